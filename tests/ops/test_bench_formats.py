"""The benchmark of every format calls the operations as they are; here on a toy, on the host."""

import numpy as np
import pytest

from nbmoe.backend import simulator_enabled
from nbmoe.bench import formats
from nbmoe.bench.kernels import QWEN3_30B


@pytest.mark.skipif(simulator_enabled(), reason="its operands are numpy arrays")
def test_every_call_writes_the_same_into_its_own_buffers(monkeypatch):
    toy = {"experts": 4, "top_k": 2, "hidden": 128, "moe_dim": 128}
    for key, value in toy.items():
        monkeypatch.setitem(QWEN3_30B, key, value)
    monkeypatch.setattr(formats, "put", lambda array: array)
    made, stage = [], formats.stage

    def recorded(op, *args, **keys):
        made.append(stage(op, *args, **keys))
        return made[-1]

    monkeypatch.setattr(formats, "stage", recorded)
    names = [name for name, make in formats.all_stages(formats.Problem(3)).items() if make()]
    assert len(names) == 7 and len(made) == 4 * 3 + 6 + 2 * 4
    for out, call in made:
        buffers = out if isinstance(out, tuple) else (out,)
        before = [buffer.tobytes() for buffer in buffers]
        codes = buffers[0].view(np.uint8)
        codes[...] = 0xAA
        call(None)
        assert [buffer.tobytes() for buffer in buffers] == before
