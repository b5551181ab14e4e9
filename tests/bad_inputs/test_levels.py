"""P10, P12: results go where they are asked for, and the cheap level reads nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbmoe import arrays, ops, reference
from nbmoe.prepared import pack_weights
from tests.bad_inputs.case import Recorder
from tests.bad_inputs.test_bad_call import on_gpu
from tests.bad_inputs.valid import LAUNCHES, VALID, function, op_name
from tests.conftest import is_prepared

ENTRIES = tuple(VALID)


def data_of(result: Any) -> Any:
    """The array of prepared operands; any other result as it is."""
    return result.data if is_prepared(result) else result


def reference_of(entry: str) -> Callable[..., Any]:
    """The specification of an entry's operation."""
    if op_name(entry) == "prepare_weights":
        return lambda *args, format="bf16", **kwargs: pack_weights(*args, format=format, **kwargs)
    found: Callable[..., Any] = getattr(reference, op_name(entry))
    return found


@pytest.mark.parametrize("entry", ENTRIES)
def test_out_is_returned(entry: str) -> None:
    arguments = VALID[entry]()
    result = data_of(function(entry)(**arguments, backend="reference"))
    out = arguments["out"]
    pairs = zip(result, out, strict=True) if isinstance(out, tuple) else ((result, out),)
    assert all(r is o for r, o in pairs)


@pytest.mark.parametrize("entry", ENTRIES)
def test_valid_call_equals_the_reference(entry: str) -> None:
    """The op's reference backend is `nbmoe.reference`, with and without buffers."""
    arguments = VALID[entry]()
    for name in ("out", "workspace"):
        arguments.pop(name, None)
    got = data_of(function(entry)(**arguments, backend="reference"))
    expected = data_of(reference_of(entry)(**arguments))
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else ((got, expected),)
    for g, e in pairs:
        assert g.dtype == e.dtype and g.shape == e.shape and g.tobytes() == e.tobytes()


@pytest.mark.parametrize("entry", ENTRIES)
def test_gpu_call_reads_and_allocates_nothing(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: with buffers given, a call on a GPU is launches on addresses and nothing else."""
    monkeypatch.setattr("nbmoe.backend.problem", lambda name: None)
    monkeypatch.setattr(arrays, "read", lambda array: pytest.fail("an element was read"))
    monkeypatch.setattr(arrays, "empty", lambda *args: pytest.fail("memory was allocated"))
    arguments = on_gpu(entry)
    function(entry)(**arguments, stream=77)
    assert len(recorder.launches) == LAUNCHES.get(op_name(entry), 1)
    for _, grid, _, stream in recorder.launches:
        assert stream == 77 and all(g > 0 for g in grid)
    args = {value for launch in recorder.launches for value in launch[2] if isinstance(value, int)}
    pointers = [value.pointer for value in arguments.values() if hasattr(value, "pointer")]
    out = arguments["out"]
    pointers += [o.pointer for o in out] if isinstance(out, tuple) else []
    assert set(pointers) <= args


@pytest.mark.parametrize("entry", ENTRIES)
def test_shapes_level_reads_nothing_on_the_host(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "read", lambda array: pytest.fail("an element was read"))
    function(entry)(**VALID[entry](), validate="shapes")
    assert len(recorder.launches) == LAUNCHES.get(op_name(entry), 1)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("level", ["metadata", "full"])
def test_every_level_accepts_a_valid_call(entry: str, level: str, recorder: Recorder) -> None:
    function(entry)(**VALID[entry](), validate=level)
    assert len(recorder.launches) == LAUNCHES.get(op_name(entry), 1)


def test_levels_on_the_host(recorder: Recorder) -> None:
    """NaN weights are data of a token, refused only when asked; a bad order always is."""
    arguments = VALID["moe_finalize"]()
    arguments["weights"][0] = np.nan
    ops.moe_finalize(**arguments)
    ops.moe_finalize(**arguments, validate="metadata")
    with pytest.raises(ValueError, match="weights"):
        ops.moe_finalize(**arguments, validate="full")
