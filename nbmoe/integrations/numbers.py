"""Numbers for objects: what a custom operator takes instead of an object."""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

from nbmoe.errors import ConfigError, message

T = TypeVar("T")


class Numbers(Generic[T]):
    """Objects by number, which does not keep them alive."""

    def __init__(self, operator: str, argument: str) -> None:
        self._operator, self._argument = operator, argument
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        self._numbers: weakref.WeakKeyDictionary[T, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()

    def of(self, found: T) -> int:
        """The number of an object, the same each time."""
        number = self._numbers.get(found)
        if number is None:
            number = self._numbers[found] = next(self._next)
            self._objects[number] = found
        return number

    def get(self, number: int) -> T:
        """The object of a number.

        Raises:
            ConfigError: It is no more, or never was.
        """
        found = self._objects.get(number)
        if found is None:
            rule = f"the number of {self._argument} that still exists"
            hint = "keep the object as long as what was compiled or captured with it"
            raise ConfigError(message(self._operator, "number", rule, number, hint))
        return found
