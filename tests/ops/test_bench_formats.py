"""The benchmark of every format calls the operations as they are; here on a toy, on the host."""

import pytest

from nbmoe.backend import simulator_enabled
from nbmoe.bench import formats
from nbmoe.bench.kernels import QWEN3_30B


@pytest.mark.skipif(simulator_enabled(), reason="its operands are numpy arrays")
def test_every_stage_runs_into_its_own_buffers(monkeypatch):
    toy = {"experts": 4, "top_k": 2, "hidden": 128, "moe_dim": 128}
    for key, value in toy.items():
        monkeypatch.setitem(QWEN3_30B, key, value)
    monkeypatch.setattr(formats, "put", lambda array: array)
    made = formats.all_stages(formats.Problem(3))
    assert len(made) == 7
    for make in made.values():
        assert [call(None) is None for call in make().values()]
