"""The operands of one call, checked from what the host knows about them, before anything runs."""

from __future__ import annotations

import functools
import numbers
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from numpy.typing import NDArray

from nbmoe import arrays
from nbmoe.arrays import Array, Extent, describe
from nbmoe.backend import Backend, Choice, check_choice_reaches, resolve_choice
from nbmoe.errors import (
    AliasError,
    ArgTypeError,
    CaptureError,
    ConfigError,
    DTypeError,
    LayoutError,
    RangeError,
    ShapeError,
    UnsupportedError,
    message,
)
from nbmoe.streams import gpu_stream, host_stream, is_capturing
from nbmoe.validate.elements import BF16, Elements, dtype_hint

LEVELS = ("shapes", "metadata", "full")
MAX_DIMENSION = 2**31 - 1
MAX_BYTES = 2**63 - 1
FLAT = "(bytes,)"
"""The shape of prepared weights: the axis counts bytes of memory, and no kernel indexes by it."""
MAX_BLOCKS_Y = 65_535
"""Thread blocks of a grid along y."""


@functools.cache
def _axes(symbols: str) -> tuple[int, ...]:
    """Numbers of axes of symbolic shapes: "(T, min(S, T)) or (M,)" gives (2, 1)."""
    calls = re.compile(r"\w+\([^()]*\)")
    return tuple(
        calls.sub("n", shape).strip("(,)").count(",") + 1 for shape in symbols.split(" or ")
    )


@functools.lru_cache(maxsize=4096)
def _is_acceptable(dtype: str, extent: Extent, elements: Elements, symbols: str) -> bool:
    """Whether an operand passes every rule that its address has no part in; calls repeat."""
    return (
        dtype in elements.names
        and len(extent.shape) in _axes(symbols)
        and (symbols == FLAT or max(extent.shape) <= MAX_DIMENSION)
        and extent.nbytes <= MAX_BYTES
        and extent.is_contiguous
    )


class Call:
    """One call of a public function: its operands, outputs, backend and level of checking.

    Levels, each including the one before:

    * "shapes": types, shapes, layouts, devices, overlaps. Reads no element; always on.
    * "metadata": reads routing metadata and scales. Default on the host; on a GPU it copies and
      waits.
    * "full": also refuses values that are legal but suspicious, such as NaN router logits.
    """

    def __init__(self, api: str, validate: str | None) -> None:
        """Starts a call.

        Args:
            api: Public function, for messages.
            validate: A level, or None for the backend's default.

        Raises:
            ArgTypeError: `validate` is not a string.
            ConfigError: `validate` is not a level.
        """
        self.api = api
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        self._names: dict[str, str] = {}
        if validate is not None and not isinstance(validate, str):
            raise ArgTypeError(self.message("validate", f"one of {LEVELS} or None", repr(validate)))
        if validate is not None and validate not in LEVELS:
            raise ConfigError(self.message("validate", f"one of {LEVELS}", repr(validate)))
        self._validate = validate
        self._stream = 0

    def message(self, arg: str, rule: str, value: object, hint: str = "") -> str:
        """Builds an error message of this call."""
        texts = (self._renamed(str(text)) for text in (arg, rule, value, hint))
        return message(self.api, *texts)

    # Names

    @contextmanager
    def naming(self, **names: str) -> Iterator[None]:
        """Within it, checks that speak of ``hidden=`` mean, say, ``"hidden_states"``.

        So the checks of an operation serve one that has several of its operands.
        """
        outer, self._names = self._names, names
        try:
            yield
        finally:
            self._names = outer

    def taken(self, arg: str) -> Array:
        """An input that was taken."""
        return self.inputs[self._names.get(arg, arg)]

    def _renamed(self, text: str) -> str:
        if not self._names:
            return text
        return re.sub(rf"\b({'|'.join(self._names)})\b", lambda m: self._names[m[0]], text)

    # Arrays

    def array(
        self,
        arg: str,
        x: Any,
        elements: Elements,
        shape: str,
        *,
        missing: type[Exception] = ArgTypeError,
    ) -> Array:
        """Takes an input.

        Args:
            arg: Argument name.
            x: The caller's object.
            elements: Accepted element types.
            shape: Symbolic shape, such as "(M, K/2)", or several joined by " or "; the number of
                axes is checked.
            missing: Error for None.

        Raises:
            ArgTypeError: `x` is no array, or None.
            DTypeError, ShapeError, LayoutError, RangeError: as its element type, number of axes,
                strides and alignment, and size demand.
            UnsupportedError: `x` is float16 where bfloat16 is supported.
        """
        if x is None:
            raise missing(self.message(arg, f"{shape} {elements}", "None", f"{arg} is required"))
        described = describe(self.api, self._names.get(arg, arg), x)
        self._check_array(arg, described, elements, shape)
        self.inputs[self._names.get(arg, arg)] = described
        return described

    def optional(self, arg: str, x: Any, elements: Elements, shape: str) -> Array | None:
        """Takes an input that may be None."""
        return None if x is None else self.array(arg, x, elements, shape)

    def output(
        self,
        arg: str,
        x: Any,
        elements: Elements,
        symbols: str,
        shape: tuple[int, ...],
        *,
        longer: bool = False,
    ) -> Array:
        """Takes a buffer for an output.

        Args:
            arg: Name in messages.
            x: The caller's object.
            elements: Accepted element types.
            symbols: Symbolic shape.
            shape: Exact shape.
            longer: Whether the first axis may be longer.

        Raises:
            ArgTypeError, DTypeError, ShapeError, LayoutError: as for inputs; LayoutError also if
                the buffer is read-only.
        """
        described = describe(self.api, arg, x)
        self._check_array(arg, described, elements, symbols)
        fits = described.shape[0] >= shape[0] if longer else described.shape[0] == shape[0]
        if not fits or described.shape[1:] != shape[1:]:
            at_least = " or longer" if longer else ""
            raise ShapeError(self.message(arg, f"{symbols} = {shape}{at_least}", described.shape))
        if not described.writeable:
            raise LayoutError(self.message(arg, "a writeable array", "not writeable"))
        self.outputs[arg] = described
        return described

    def out_tuple(self, out: Any, names: tuple[str, ...]) -> tuple[Any, ...] | None:
        """Takes `out=` of a function with several outputs.

        Raises:
            ArgTypeError: `out` is not a tuple of that many.
        """
        if out is not None and not (isinstance(out, tuple) and len(out) == len(names)):
            got = f"{type(out).__name__}"
            if isinstance(out, tuple | list):
                got += f" of {len(out)}"
            raise ArgTypeError(self.message("out", f"a tuple ({', '.join(names)})", got))
        return out

    def _check_array(self, arg: str, x: Array, elements: Elements, shape: str) -> None:
        if not _is_acceptable(x.dtype, x.extent, elements, shape):
            self._refuse_array(arg, x, elements, shape)
        if x.pointer % elements.align and x.extent.nbytes:
            got = f"address {x.pointer:#x}"
            hint = "copy it: slices may start anywhere"
            raise LayoutError(
                self.message(arg, f"memory aligned to {elements.align} bytes", got, hint)
            )

    def _refuse_array(self, arg: str, x: Array, elements: Elements, shape: str) -> NoReturn:
        if x.dtype not in elements.names:
            rule = f"{shape} {elements}"
            if x.dtype == "float16" and elements is BF16:
                raise UnsupportedError(self.message(arg, rule, x.dtype, "convert to bfloat16"))
            raise DTypeError(self.message(arg, rule, x.dtype, dtype_hint(elements, x.dtype)))
        axes = _axes(shape)
        if len(x.shape) not in axes:
            squeezable = len(x.shape) == max(axes) + 1 and 1 in x.shape
            hint = "drop the axis of length 1 with .squeeze()" if squeezable else ""
            raise ShapeError(self.message(arg, f"{shape} {elements}", f"shape {x.shape}", hint))
        if shape != FLAT and max(x.shape) > MAX_DIMENSION:
            rule = f"axes of at most {MAX_DIMENSION}"
            raise RangeError(self.message(arg, rule, f"shape {x.shape}"))
        if x.nbytes > MAX_BYTES:
            rule = f"at most {MAX_BYTES} bytes"
            raise RangeError(self.message(arg, rule, f"shape {x.shape} of {x.dtype}"))
        got = f"strides {x.strides} for shape {x.shape}"
        hint = "copy it with numpy.ascontiguousarray(x) or x.contiguous()"
        raise LayoutError(self.message(arg, "a C-contiguous array", got, hint))

    def shape(self, arg: str, expected: tuple[int | None, ...], rule: str, hint: str = "") -> None:
        """Refuses an input whose axes have other sizes; None means any.

        Raises:
            ShapeError: a size differs.
        """
        got = self.taken(arg).extent.shape
        if got == expected:
            return
        if any(e is not None and e != g for e, g in zip(expected, got, strict=True)):
            raise ShapeError(self.message(arg, rule, f"shape {got}", hint))

    # Numbers

    def integer(self, arg: str, value: Any, low: int, high: int = MAX_DIMENSION) -> int:
        """Takes a whole number in [low, high].

        Raises:
            ArgTypeError: `value` is a bool, a float or no number.
            RangeError: `value` is outside.
        """
        rule = f"an int in [{low}, {high}]"
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ArgTypeError(self.message(arg, rule, f"{type(value).__name__} {value!r}"))
        number = int(value)
        if not low <= number <= high:
            raise RangeError(self.message(arg, rule, number))
        return number

    def boolean(self, arg: str, value: Any) -> bool:
        """Takes True or False.

        Raises:
            ArgTypeError: `value` is anything else.
        """
        if not isinstance(value, bool):
            raise ArgTypeError(self.message(arg, "a bool", f"{type(value).__name__} {value!r}"))
        return value

    def multiple(self, arg: str, symbol: str, value: int, of: int, hint: str = "") -> None:
        """Refuses a size that is not a positive multiple.

        Raises:
            ShapeError: it is not.
        """
        if value <= 0 or value % of:
            rule = f"{symbol} > 0 and {symbol} % {of} == 0"
            raise ShapeError(self.message(arg, rule, f"{symbol} = {value}", hint))

    def positive(self, arg: str, symbol: str, value: int) -> None:
        """Refuses a size of 0.

        Raises:
            ShapeError: it is 0.
        """
        if value <= 0:
            raise ShapeError(self.message(arg, f"{symbol} > 0", f"{symbol} = {value}"))

    def at_most(self, arg: str, symbol: str, value: int, most: int) -> None:
        """Refuses a size that no grid covers.

        Raises:
            ShapeError: it is larger.
        """
        if value > most:
            raise ShapeError(self.message(arg, f"{symbol} <= {most}", f"{symbol} = {value}"))

    # Where it runs

    def place(self, backend: str | None, stream: Any) -> Backend:
        """Checks devices, streams and overlaps, and chooses the backend.

        Raises:
            DeviceError: operands are out of reach, on two devices, or the backend cannot run.
            AliasError: an output overlaps an input or another output.
            ArgTypeError, ConfigError, UnsupportedError: as `nbmoe.backend.resolve`.
        """
        operands = self.inputs | self.outputs
        places = tuple(operands.values())
        # A backend that was asked for and cannot run is the first thing to know.
        asked = Choice.of(self.api, backend)
        chosen = resolve_choice(self.api, asked) if asked.name else None
        check_choice_reaches(self.api, asked, operands)
        self._check_overlaps()
        if places[0].kind.on_gpu:
            self._stream = gpu_stream(self.api, stream, places)
        else:
            host_stream(self.api, stream)
        chosen = chosen or resolve_choice(self.api, asked, places)
        if chosen.on_gpu and self.checks("metadata") and is_capturing(self._stream):
            rule = "no CUDA graph capture while elements are read"
            got = f"validate={self._validate!r} during a capture"
            hint = "warm up first, then capture with validate='shapes'"
            raise CaptureError(self.message("validate", rule, got, hint))
        return chosen

    @property
    def stream(self) -> int:
        """Handle of the stream to launch on, meaningless on the host."""
        return self._stream

    def _check_overlaps(self) -> None:
        outputs = list(self.outputs.items())
        for i, (arg, out) in enumerate(outputs):
            others = list(self.inputs.items()) + outputs[:i]
            for other_arg, other in others:
                if out.overlaps(other):
                    rule = f"memory apart from {other_arg}"
                    got = f"addresses {out.pointer:#x} and {other.pointer:#x} that overlap"
                    raise AliasError(self.message(arg, rule, got))

    # Levels

    def checks(self, level: str) -> bool:
        """Whether a level is on: as asked for, else up to "metadata" on the host."""
        default = "shapes" if next(iter(self.inputs.values())).kind.on_gpu else "metadata"
        return LEVELS.index(level) <= LEVELS.index(self._validate or default)

    def data(self, array: Array) -> NDArray[Any]:
        """The elements of an operand, on the host."""
        return arrays.read(array)
