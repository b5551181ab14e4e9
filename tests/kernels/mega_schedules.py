"""Looks for findings in a small MegaFFN over many schedules; minutes.

python -m tests.kernels.mega_schedules [SCHEDULES]
"""

import sys
import time

from nbmoe.formats import NVFP4
from tests.kernels.test_mega_ffn_sm90 import check, checked, config_of, problem
from tests.strategies import Slots


def main(schedules: int) -> None:
    """Every way to multiply and to end a tile, under random schedules; raises what is found."""
    p = problem(7, NVFP4, 64, 32, 16, Slots((9, 2, 0, 3), (0, 1, 2, -1), 4, 0))
    for kind in ("wgmma", "warps", "finish"):
        begin = time.perf_counter()
        for seed in range(schedules):
            check(config_of(NVFP4, kind, (8,)), p, executor=checked(seed))
        print(f"{kind}: nothing in {schedules} schedules, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
