"""Refusal of bad input: a typed error before any launch, with every output untouched.

`Call` checks what the host knows without reading an element. `routing` and `scales` check what
takes reading.
"""

from nbmoe.validate.call import LEVELS, Call
from nbmoe.validate.elements import BF16, F32, I32, ROW_SCALES, U32, Elements

__all__ = [
    "BF16",
    "F32",
    "I32",
    "LEVELS",
    "ROW_SCALES",
    "U32",
    "Call",
    "Elements",
]
