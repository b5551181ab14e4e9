"""A matmul's bytes do not depend on the order in which its threads and blocks run.

The order fifo is that of `test_shipped_kernels`.
"""

from functools import partial

import pytest

from tests.emulator.checked.matmul_calls import others, smallest
from tests.emulator.checked.orders import check_orders

SMALLEST, OTHERS = smallest(), others()


@pytest.mark.parametrize("name", SMALLEST)
def test_every_order_gives_the_bytes_of_the_fast_engine(name: str) -> None:
    call = partial(SMALLEST[name], "emulate")
    check_orders(call, call(), ("random:1", "pct:3:1"))


@pytest.mark.parametrize("name", OTHERS)
def test_other_variants_give_the_bytes_of_the_reference(name: str) -> None:
    call = OTHERS[name]
    check_orders(partial(call, "emulate"), call("reference"), ["random:2"])
