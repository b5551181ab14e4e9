"""A bad input and the check that it is refused: typed, named, before any launch or write."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bad_inputs.valid import POISON, VALID, Arguments, function, op_name


@dataclass(frozen=True)
class Case:
    """One spoilt call.

    Attributes:
        id: Row of the table it proves, and what is spoilt.
        change: Spoils the valid arguments in place.
        error: The exact class that must be raised.
        arg: The argument that the message must name.
        got: Pattern of the received value in the message.
        says: Pattern anywhere in the message, mostly the hint.
        extra: More arguments of the call.
        api: The function that the message must name, if it is not the one that is called.
    """

    id: str
    change: Callable[[Arguments], Any]
    error: type[Exception]
    arg: str
    got: str
    says: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    api: str = ""


@dataclass
class FakeDeviceArray:
    """Memory of a GPU as far as the host can tell: nothing behind it may be touched."""

    shape: tuple[int, ...]
    typestr: str
    device_id: int = 0
    pointer: int = 1 << 40
    strides: tuple[int, ...] | None = None
    stream: int | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (self.pointer, False),
            "strides": self.strides,
            "stream": self.stream,
            "version": 3,
        }

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.device_id)

    @classmethod
    def of(cls, array: Any, **kwargs: Any) -> "FakeDeviceArray":
        """One with the shape and type of a numpy array, bfloat16 and float8 as their bits."""
        bits = {"bfloat16": "<u2", "float8_e8m0fnu": "|u1", "float8_e4m3fn": "|u1"}
        typestr = bits.get(array.dtype.name, array.dtype.str)
        return cls(array.shape, typestr, **kwargs)


class Recorder:
    """An executor that runs nothing."""

    multiprocessors = 1

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, kernel: Any, grid: Any, args: Any, stream: Any) -> None:
        self.launches.append((kernel.name, grid, args, stream))


def buffers(arguments: Arguments) -> list[Any]:
    """The numpy buffers in `out=`."""
    out = arguments.get("out")
    return [b for b in (out if isinstance(out, tuple) else (out,)) if isinstance(b, np.ndarray)]


def check(entry: str, case: Case, recorder: Recorder) -> None:
    """Makes the spoilt call of an entry of `VALID` and checks all that a refusal promises."""
    arguments = VALID[entry]()
    untouched = buffers(arguments)
    case.change(arguments)
    refused(function(entry), arguments, case, case.api or op_name(entry), recorder)
    assert all((b.view(np.uint8) == POISON).all() for b in untouched if b.flags.c_contiguous)


def refused(
    call: Callable[..., Any], arguments: Arguments, case: Case, api: str, recorder: Recorder
) -> None:
    """Checks the error of a call, that nothing was launched and that no output was written."""
    before = [(b, b.tobytes()) for b in buffers(arguments)]
    with pytest.raises(case.error) as caught:
        call(**arguments, **case.extra)
    text = str(caught.value)
    assert type(caught.value) is case.error, text
    pattern = rf"{re.escape(api)}\(\): {re.escape(case.arg)}: expected .+, got .*{case.got}"
    assert re.match(pattern, text, re.S), text
    assert re.search(case.says, text), text
    assert not recorder.launches
    assert all(b.tobytes() == bytes_before for b, bytes_before in before)


def params(cases: Iterable[Case]) -> list[Any]:
    """The cases as parameters with their ids."""
    return [pytest.param(case, id=case.id) for case in cases]


def table(cases: dict[str, Iterable[Case]]) -> list[Any]:
    """Entries and their cases as parameters with ids."""
    return [
        pytest.param(entry, case, id=f"{entry}-{case.id}")
        for entry, of_entry in cases.items()
        for case in of_entry
    ]


def put(**values: Any) -> Callable[[Arguments], None]:
    """A change that replaces arguments."""
    return lambda arguments: arguments.update(values)


def edit(name: str, index: Any, value: Any) -> Callable[[Arguments], None]:
    """A change that overwrites elements of an array argument."""

    def change(arguments: Arguments) -> None:
        arguments[name][index] = value

    return change


def remake(name: str, make: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    """A change that computes a new value of an argument from its valid one."""

    def change(arguments: Arguments) -> None:
        arguments[name] = make(arguments[name])

    return change


def without(*names: str) -> Callable[[Arguments], None]:
    """A change that leaves arguments away."""

    def change(arguments: Arguments) -> None:
        for name in names:
            arguments.pop(name, None)

    return change


def both(*changes: Callable[[Arguments], Any]) -> Callable[[Arguments], None]:
    """Changes one after the other."""

    def change(arguments: Arguments) -> None:
        for one in changes:
            one(arguments)

    return change


def shorter(name: str) -> Callable[[Arguments], None]:
    """A change that takes the last entry along the first axis away."""
    return remake(name, lambda x: x[:-1].copy())


def narrow(name: str, columns: int) -> Callable[[Arguments], None]:
    """A change that keeps some entries along the last axis."""
    return remake(name, lambda x: x[..., :columns].copy())


def cast(name: str, dtype: Any) -> Callable[[Arguments], None]:
    """A change of an array's element type."""
    return remake(name, lambda x: x.astype(dtype))
