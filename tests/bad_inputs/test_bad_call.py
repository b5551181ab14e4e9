"""P10, P11: bad backends, streams, levels and keywords of every operation (C18, C22-C24, K4-K5)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbmoe import backend
from nbmoe.errors import ArgTypeError, CaptureError, ConfigError, DeviceError
from nbmoe.validate import call as calls
from nbmoe_kernels.kernel import NotLoadedError
from tests.bad_inputs.case import Case, FakeDeviceArray, Recorder, check, params
from tests.bad_inputs.valid import LAUNCHES, VALID, Arguments, function, op_name

ENTRIES = tuple(VALID)


def nothing(arguments: Arguments) -> None:
    """Leaves the arguments valid."""


def on_gpu(entry: str, **kwargs: Any) -> Arguments:
    """The valid arguments as arrays of a GPU, buffers included, at addresses apart."""
    arguments, at = VALID[entry](), 1 << 40

    def move(value: Any) -> Any:
        nonlocal at
        if isinstance(value, tuple):
            return tuple(move(v) for v in value)
        if isinstance(value, np.ndarray):
            at += 1 << 20
            return FakeDeviceArray.of(value, pointer=at, **kwargs)
        return value

    return {name: move(value) for name, value in arguments.items()}


BAD = [
    Case("K4", nothing, ConfigError, "backend", "'cuda'", "'emulate'", {"backend": "cuda"}),
    Case("K4-type", nothing, ArgTypeError, "backend", "int 3", "'gpu'", {"backend": 3}),
    Case("level", nothing, ConfigError, "validate", "'all'", "'full'", {"validate": "all"}),
    Case("level-type", nothing, ArgTypeError, "validate", "True", "", {"validate": True}),
    Case("C23-int", nothing, ArgTypeError, "stream", "int 7", "simulator", {"stream": 7}),
    Case("C23-str", nothing, ArgTypeError, "stream", "str 's'", "", {"stream": "s"}),
    Case("C23-bool", nothing, ArgTypeError, "stream", "bool False", "", {"stream": False}),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("case", params(BAD))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


@pytest.mark.parametrize("entry", ENTRIES)
def test_gpu_that_is_not_there(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K5: the reason and the remedy are in the message, and nothing falls back."""
    trouble = backend.Problem("no NVIDIA driver", "use backend='emulate'")
    monkeypatch.setattr(backend, "problem", lambda name: trouble)
    with pytest.raises(
        DeviceError, match=rf"{op_name(entry)}\(\): .*no NVIDIA driver — use backend='emulate'"
    ):
        function(entry)(**VALID[entry](), backend="gpu")
    assert not recorder.launches


@pytest.mark.parametrize("entry", ENTRIES)
def test_gpu_arrays_without_a_gpu(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = backend.Problem("no NVIDIA driver", "use backend='emulate'")
    monkeypatch.setattr(backend, "problem", lambda name: trouble if name == "gpu" else None)
    with pytest.raises(DeviceError, match="no NVIDIA driver — use backend='emulate'"):
        function(entry)(**on_gpu(entry))
    assert not recorder.launches


@pytest.mark.parametrize("entry", ENTRIES)
def test_bad_variable(entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """K13: the message names the variable."""
    monkeypatch.setenv("NBMOE_BACKEND", "gpus")
    with pytest.raises(ConfigError, match=r"NBMOE_BACKEND: expected one of .*, got 'gpus' — mend"):
        function(entry)(**VALID[entry]())
    assert not recorder.launches


@pytest.mark.parametrize("entry", ENTRIES)
def test_variable_that_does_not_fit_the_arrays(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: host arrays are not copied because the environment says so."""
    monkeypatch.setenv("NBMOE_BACKEND", "gpu")
    monkeypatch.setattr(backend, "problem", lambda name: None)
    with pytest.raises(DeviceError, match=r"of the GPU \(NBMOE_BACKEND=gpu\), got one of the host"):
        function(entry)(**VALID[entry]())
    assert not recorder.launches


@pytest.mark.parametrize("entry", ENTRIES)
def test_unknown_keyword(entry: str) -> None:
    """C22: no function swallows keywords."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'expert_offset'"):
        function(entry)(**VALID[entry](), expert_offset=1)


@pytest.mark.parametrize("entry", ENTRIES)
def test_keyword_only(entry: str) -> None:
    """W8: what stands behind the star cannot be given by position."""
    values = list(VALID[entry]().values())
    with pytest.raises(TypeError, match="positional argument"):
        function(entry)(*values, None, None, None)


@pytest.mark.parametrize("entry", ENTRIES)
def test_stream_of_another_gpu(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C23."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    stream = SimpleNamespace(device=SimpleNamespace(index=1), cuda_stream=5)
    with pytest.raises(
        DeviceError, match=r"stream: expected a stream of GPU 0.*, got one of GPU 1"
    ):
        function(entry)(**on_gpu(entry), stream=stream)
    with pytest.raises(ArgTypeError, match=r"stream: expected None, a handle, .*, got str 'x'"):
        function(entry)(**on_gpu(entry), stream="x")
    assert not recorder.launches


@pytest.mark.parametrize("entry", ENTRIES)
def test_reading_during_capture(
    entry: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C24: a capture cannot wait for data."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    monkeypatch.setattr(calls, "is_capturing", lambda stream: True)
    with pytest.raises(CaptureError, match=r"validate='metadata' during a capture — warm up first"):
        function(entry)(**on_gpu(entry), validate="metadata")
    assert not recorder.launches
    function(entry)(**on_gpu(entry))
    assert len(recorder.launches) == LAUNCHES.get(entry, 1)


@pytest.mark.parametrize("entry", ENTRIES)
def test_cold_capture(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C24: nothing is compiled or loaded while a stream is being captured."""

    def refuse(kernel: Any, grid: Any, args: Any, stream: Any) -> None:
        raise NotLoadedError(f"{kernel.name} is not loaded yet")

    monkeypatch.setattr(backend, "problem", lambda name: None)
    monkeypatch.setattr(backend, "executor", lambda *args, **kwargs: refuse)
    got = r"got \w+ is not loaded yet — warm up first"
    with pytest.raises(CaptureError, match=rf"{op_name(entry)}\(\): stream: expected .*, {got}"):
        function(entry)(**on_gpu(entry))
