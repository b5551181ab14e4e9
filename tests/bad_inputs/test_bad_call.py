"""P10, P11: bad backends, streams, levels and keywords of every operation (C18, C22-C24, K4-K5)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbmoe import backend, ops
from nbmoe.errors import ArgTypeError, CaptureError, ConfigError, DeviceError
from nbmoe.validate import call as calls
from tests.bad_inputs.case import Case, FakeDeviceArray, Recorder, check, params
from tests.bad_inputs.valid import VALID, Arguments

APIS = tuple(VALID)
ON_GPU = tuple(api for api in APIS if api != "route")


def nothing(arguments: Arguments) -> None:
    """Leaves the arguments valid."""


def on_gpu(api: str, **kwargs: Any) -> Arguments:
    """The valid arguments as arrays of a GPU, buffers included, at addresses apart."""
    arguments, at = VALID[api](), 1 << 40

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


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("case", params(BAD))
def test_refused(api: str, case: Case, recorder: Recorder) -> None:
    check(api, case, recorder)


@pytest.mark.parametrize("api", APIS)
def test_gpu_that_is_not_there(
    api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K5: the reason and the remedy are in the message, and nothing falls back."""
    trouble = backend.Problem("no NVIDIA driver", "use backend='emulate'")
    monkeypatch.setattr(backend, "problem", lambda name: trouble)
    with pytest.raises(
        DeviceError, match=rf"{api}\(\): .*no NVIDIA driver — use backend='emulate'"
    ):
        getattr(ops, api)(**VALID[api](), backend="gpu")
    assert not recorder.launches


@pytest.mark.parametrize("api", ON_GPU)
def test_gpu_arrays_without_a_gpu(
    api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = backend.Problem("no NVIDIA driver", "use backend='emulate'")
    monkeypatch.setattr(backend, "problem", lambda name: trouble if name == "gpu" else None)
    with pytest.raises(DeviceError, match="no NVIDIA driver — use backend='emulate'"):
        getattr(ops, api)(**on_gpu(api))
    assert not recorder.launches


@pytest.mark.parametrize("api", APIS)
def test_bad_variable(api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """K13: the message names the variable."""
    monkeypatch.setenv("NBMOE_BACKEND", "gpus")
    with pytest.raises(ConfigError, match=r"NBMOE_BACKEND: expected one of .*, got 'gpus' — mend"):
        getattr(ops, api)(**VALID[api]())
    assert not recorder.launches


@pytest.mark.parametrize("api", ON_GPU)
def test_variable_that_does_not_fit_the_arrays(
    api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: host arrays are not copied because the environment says so."""
    monkeypatch.setenv("NBMOE_BACKEND", "gpu")
    monkeypatch.setattr(backend, "problem", lambda name: None)
    with pytest.raises(DeviceError, match=r"of the GPU \(NBMOE_BACKEND=gpu\), got one of the host"):
        getattr(ops, api)(**VALID[api]())
    assert not recorder.launches


@pytest.mark.parametrize("api", APIS)
def test_unknown_keyword(api: str) -> None:
    """C22: no function swallows keywords."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'expert_offset'"):
        getattr(ops, api)(**VALID[api](), expert_offset=1)


@pytest.mark.parametrize("api", APIS)
def test_keyword_only(api: str) -> None:
    """W8: what stands behind the star cannot be given by position."""
    values = list(VALID[api]().values())
    with pytest.raises(TypeError, match="positional argument"):
        getattr(ops, api)(*values, None, None, None)


@pytest.mark.parametrize("api", ON_GPU)
def test_stream_of_another_gpu(
    api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C23."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    stream = SimpleNamespace(device=SimpleNamespace(index=1), cuda_stream=5)
    with pytest.raises(
        DeviceError, match=r"stream: expected a stream of GPU 0.*, got one of GPU 1"
    ):
        getattr(ops, api)(**on_gpu(api), stream=stream)
    with pytest.raises(ArgTypeError, match=r"stream: expected None, a handle, .*, got str 'x'"):
        getattr(ops, api)(**on_gpu(api), stream="x")
    assert not recorder.launches


@pytest.mark.parametrize("api", ON_GPU)
def test_reading_during_capture(
    api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C24: a capture cannot wait for data."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    monkeypatch.setattr(calls, "is_capturing", lambda stream: True)
    with pytest.raises(CaptureError, match=r"validate='metadata' during a capture — warm up first"):
        getattr(ops, api)(**on_gpu(api), validate="metadata")
    assert not recorder.launches
    getattr(ops, api)(**on_gpu(api))
    assert len(recorder.launches) == 1
