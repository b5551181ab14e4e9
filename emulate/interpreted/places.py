"""What a timeline says of the memory that an op waits on, reads or reports to."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.interpreted.machine import machine
from nbmoe_kernels.device import effects as fx
from nbmoe_kernels.device.op import Op, Timing


def argument_names(function: Any, args: tuple[Any, ...]) -> dict[int, str]:
    """The parameters of a launch's arrays, by the array's id."""
    names = function.__code__.co_varnames
    return {id(arg): name for name, arg in zip(names, args) if isinstance(arg, np.ndarray)}


@functools.cache
def describer(op: Op) -> Callable[..., dict[str, str]]:
    """From a call's arguments to ``on`` of a wait, ``of`` and ``to`` of a copy.

    A wait is on an element, a copy is of an array, to the mbarrier that counts its bytes.
    """
    spaces = {param.name: param.kind for param in op.params}
    tells: dict[str, tuple[int, str, bool]] = {}

    def tell(key: str, param: str, *, element: bool) -> None:
        tells[key] = op.arguments.index(param), spaces[param], element

    if op.timing is Timing.WAIT:
        tell("on", op.params[0].name, element=True)
    else:
        for effect in op.effects or ():
            if isinstance(effect, fx.Access) and not effect.write:
                tell("of", effect.param, element=False)
            elif isinstance(effect, fx.MbarComplete):
                tell("to", effect.param, element=True)

    def describe(*args: Any) -> dict[str, str]:
        found = {}
        for key, (at, space, element) in tells.items():
            name = _name(args[at], space)
            found[key] = f"{name}[{int(args[at + 1])}]" if element else name
        return found

    return describe


def _name(array: Any, space: str) -> str:
    """The launch's parameter, what the checked engine calls it, or the kind of memory."""
    return machine().names.get(id(array)) or str(getattr(array, "name", space))
