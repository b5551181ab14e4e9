"""``cuda.atomic`` of the interpreted engine.

Greenlets are switched only where they wait, so a read followed by a write is atomic.
"""

from typing import Any


class Atomic:
    """Read-modify-write operations; each returns the old value."""

    @staticmethod
    def add(array: Any, index: Any, value: Any) -> Any:
        """``array[index] += value``."""
        old = array[index]
        array[index] = old + array.dtype.type(value)
        return old

    @staticmethod
    def sub(array: Any, index: Any, value: Any) -> Any:
        """``array[index] -= value``."""
        old = array[index]
        array[index] = old - array.dtype.type(value)
        return old

    @staticmethod
    def min(array: Any, index: Any, value: Any) -> Any:
        """The smaller of the element and the value stays."""
        old = array[index]
        array[index] = min(old, array.dtype.type(value))
        return old

    @staticmethod
    def max(array: Any, index: Any, value: Any) -> Any:
        """The larger of the element and the value stays."""
        old = array[index]
        array[index] = max(old, array.dtype.type(value))
        return old

    @staticmethod
    def inc(array: Any, index: Any, value: Any) -> Any:
        """Count up to ``value``, then start again at 0."""
        old = array[index]
        array[index] = 0 if old >= value else old + 1
        return old

    @staticmethod
    def dec(array: Any, index: Any, value: Any) -> Any:
        """Count down to 0, then start again at ``value``."""
        old = array[index]
        array[index] = value if old == 0 or old > value else old - 1
        return old

    @staticmethod
    def and_(array: Any, index: Any, value: Any) -> Any:
        """``array[index] &= value``."""
        old = array[index]
        array[index] = old & array.dtype.type(value)
        return old

    @staticmethod
    def or_(array: Any, index: Any, value: Any) -> Any:
        """``array[index] |= value``."""
        old = array[index]
        array[index] = old | array.dtype.type(value)
        return old

    @staticmethod
    def xor(array: Any, index: Any, value: Any) -> Any:
        """``array[index] ^= value``."""
        old = array[index]
        array[index] = old ^ array.dtype.type(value)
        return old

    @staticmethod
    def exch(array: Any, index: Any, value: Any) -> Any:
        """``array[index] = value``."""
        old = array[index]
        array[index] = value
        return old

    @staticmethod
    def cas(array: Any, index: Any, expected: Any, value: Any) -> Any:
        """``array[index] = value`` if it is ``expected``."""
        old = array[index]
        if old == expected:
            array[index] = value
        return old
