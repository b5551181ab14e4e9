"""Arrays as kernels see them in the checked engine.

An access appends a number to the log (`emulate.checked.touch`) and then happens in a NumPy array.
Indices are checked at once, races and uninitialised bytes when the log is flushed.
"""

import operator
import sys
from typing import Any

import numpy as np

from emulate.checked.shadow import Region
from emulate.checked.sites import new_site, shifted_site, site_here
from emulate.checked.touch import SITE_SHIFT, SIZE_SHIFT, WRITE_SHIFT
from emulate.interpreted.scalars import dtype_of

log: list[int] = []
"""Accesses of the current thread that are not checked yet; one launch runs at a time."""
_append = log.append
_getframe = sys._getframe
_as_index = operator.index
ticks = [0]
"""Counts ``wgmma.fence``s: what was written in an earlier tick is older than the fence."""
LOG_LIMIT = 1 << 14
"""Accesses after which a thread that does not stop by itself is made to."""


class Hooks:
    """What arrays ask of the running launch."""

    def out_of_bounds(self, array: Any, index: Any, write: bool) -> Any:
        """Report an index outside of an array; does not return."""
        raise NotImplementedError

    def uninitialised(self, array: Any, index: Any, where: str) -> None:
        """Report a read of an element of a local array that nobody has written."""
        raise NotImplementedError

    def pending(self, array: Any) -> None:
        """Report a use of accumulators that an async product still works on."""
        raise NotImplementedError

    def log_is_full(self) -> None:
        """Check the log, and let other threads run."""
        raise NotImplementedError


hooks = Hooks()


def set_hooks(new: Hooks) -> None:
    """Connect arrays with a launch."""
    global hooks
    hooks = new


class _Array:
    """What tracked and local arrays have in common with NumPy's."""

    __slots__ = ("data",)
    data: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        return self.data.strides

    @property
    def itemsize(self) -> int:
        return self.data.itemsize

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        for i in range(len(self.data)):
            yield self[i]

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def place(self, index: Any) -> tuple[int, ...] | None:
        """The index of one element as ints, or None for one that names several.

        Reports an index that is out of bounds.
        """
        parts = index if type(index) is tuple else (index,)
        if len(parts) != self.data.ndim:
            return None
        found = []
        for part in parts:
            if isinstance(part, slice | type(Ellipsis) | type(None)):
                return None
            found.append(int(part))
        return tuple(found)


def _is_inside(place: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(0 <= i < extent for i, extent in zip(place, shape, strict=True))


class Tracked(_Array):
    """An array in global or shared memory.

    Attributes:
        data: the bytes.
        region: the shadow memory of the allocation that they lie in.
        address: real address of the first element.
        name: what messages call it.
    """

    __slots__ = (
        "_first",
        "_read",
        "_strides",
        "_write",
        "address",
        "name",
        "region",
    )

    def __init__(self, data: np.ndarray, region: Region, address: int, name: str) -> None:
        self.data = data
        self.region = region
        self.address = address
        self.name = name
        self._first = region.base + address - region.memory
        self._read = self._first | (data.itemsize - 1) << SIZE_SHIFT
        self._write = self._read | 1 << WRITE_SHIFT
        self._strides = data.strides

    @property
    def shadow(self) -> int:
        """The address of the first element in shadow memory."""
        return self._first

    def __getitem__(self, index: Any) -> Any:
        place = self.place(index)
        if place is None:
            return self._part(index)
        if not _is_inside(place, self.data.shape):
            return hooks.out_of_bounds(self, place if len(place) > 1 else place[0], False)
        _append((self._read + self.offset_of(place)) | site_here() << SITE_SHIFT)
        if len(log) > LOG_LIMIT:
            hooks.log_is_full()
        return self.data[place]

    def __setitem__(self, index: Any, value: Any) -> None:
        place = self.place(index)
        if place is None:
            self._fill(index, value)
            return
        if not _is_inside(place, self.data.shape):
            hooks.out_of_bounds(self, place if len(place) > 1 else place[0], True)
            return
        _append((self._write + self.offset_of(place)) | site_here() << SITE_SHIFT)
        self._store(place, value)

    def _store(self, place: Any, value: Any) -> None:
        try:
            self.data[place] = value
        except OverflowError:  # a negative Python int, which wraps in CUDA
            self.data[place] = np.int64(value)

    def _fill(self, index: Any, value: Any) -> None:
        # `array[:] = value` is a loop over the elements, as in a kernel.
        part = self._part(index)
        source = getattr(value, "data", value)
        wide = np.broadcast_to(source, part.data.shape)
        for place in np.ndindex(*part.data.shape):
            Tracked.__setitem__(part, place, wide[place])

    def _part(self, index: Any) -> "Tracked":
        parts = index if type(index) is tuple else (index,)
        for axis, one in enumerate(parts[: self.data.ndim]):
            if not isinstance(one, slice | type(Ellipsis) | type(None)):
                if not 0 <= int(one) < self.data.shape[axis]:
                    return hooks.out_of_bounds(self, int(one), False)  # type: ignore[no-any-return]
        return self._same(self.data[index])

    def _same(self, data: np.ndarray) -> "Tracked":
        address = int(data.__array_interface__["data"][0])
        return track(data, self.region, address, self.name)

    def view(self, dtype: Any) -> "Tracked":
        """The same bytes as elements of another type."""
        return self._same(self.data.view(dtype_of(dtype)))

    def reshape(self, *shape: Any) -> "Tracked":
        """The same bytes in another shape."""
        view = self.data.view()
        view.shape = shape[0] if isinstance(shape[0], tuple) else shape
        return self._same(view)

    def ravel(self) -> "Tracked":
        """The same elements in one dimension."""
        return self.reshape(self.data.size)

    @property
    def T(self) -> "Tracked":
        return self._same(self.data.T)

    def offset_of(self, place: tuple[int, ...]) -> int:
        """The byte offset of an element from the array's start."""
        return sum(map(int.__mul__, place, self._strides))


class Vector(Tracked):
    """A tracked array of one dimension; the same accesses, faster."""

    __slots__ = ("_count", "_step")

    def __init__(self, data: np.ndarray, region: Region, address: int, name: str) -> None:
        super().__init__(data, region, address, name)
        self._count = data.size
        self._step = data.strides[0]

    def __getitem__(self, index: Any) -> Any:
        try:
            at = _as_index(index)
        except TypeError:
            return Tracked.__getitem__(self, index)
        if not 0 <= at < self._count:
            return hooks.out_of_bounds(self, at, False)
        frame = _getframe(1)
        key = id(frame.f_code) + (frame.f_lasti << 47)
        site = shifted_site(key)
        if site is None:
            site = new_site(key, frame)
        _append(self._read + at * self._step + site)
        if len(log) > LOG_LIMIT:
            hooks.log_is_full()
        return self.data[at]

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            at = _as_index(index)
        except TypeError:
            Tracked.__setitem__(self, index, value)
            return
        if not 0 <= at < self._count:
            hooks.out_of_bounds(self, at, True)
            return
        frame = _getframe(1)
        key = id(frame.f_code) + (frame.f_lasti << 47)
        site = shifted_site(key)
        if site is None:
            site = new_site(key, frame)
        _append(self._write + at * self._step + site)
        try:
            self.data[at] = value
        except OverflowError:
            self._store(at, value)


class Matrix(Tracked):
    """A tracked array of two dimensions; the same accesses, faster."""

    __slots__ = ("_columns", "_rows", "_step", "_step_row")

    def __init__(self, data: np.ndarray, region: Region, address: int, name: str) -> None:
        super().__init__(data, region, address, name)
        self._rows, self._columns = data.shape
        self._step_row, self._step = data.strides

    def __getitem__(self, index: Any) -> Any:
        try:
            row, column = index
            i, j = _as_index(row), _as_index(column)
        except (TypeError, ValueError):
            return Tracked.__getitem__(self, index)
        try:
            # NumPy checks the upper bounds; a negative index has a bit that both signs share.
            value = self.data[i, j] if i | j >= 0 else self.data[self._rows, 0]
        except IndexError:
            return hooks.out_of_bounds(self, (i, j), False)
        frame = _getframe(1)
        key = id(frame.f_code) + (frame.f_lasti << 47)
        site = shifted_site(key)
        if site is None:
            site = new_site(key, frame)
        _append(self._read + i * self._step_row + j * self._step + site)
        if len(log) > LOG_LIMIT:
            hooks.log_is_full()
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            row, column = index
            i, j = _as_index(row), _as_index(column)
        except (TypeError, ValueError):
            Tracked.__setitem__(self, index, value)
            return
        if not (0 <= i < self._rows and 0 <= j < self._columns):
            hooks.out_of_bounds(self, (i, j), True)
            return
        frame = _getframe(1)
        key = id(frame.f_code) + (frame.f_lasti << 47)
        site = shifted_site(key)
        if site is None:
            site = new_site(key, frame)
        _append(self._write + i * self._step_row + j * self._step + site)
        try:
            self.data[i, j] = value
        except OverflowError:
            self._store((i, j), value)


def track(data: np.ndarray, region: Region, address: int, name: str) -> Tracked:
    """An array that is checked; see `Tracked`."""
    kind = Vector if data.ndim == 1 else Matrix if data.ndim == 2 else Tracked
    return kind(data, region, address, name)


class Local(_Array):
    """A local array: registers of one thread.

    Attributes:
        data: the elements.
        written: which of them have a value.
        is_whole: all of them are known to have one.
        state: of the whole array, shared with its parts: see `TileState`.
    """

    __slots__ = ("is_whole", "state", "written")

    def __init__(
        self, data: np.ndarray, written: np.ndarray, state: "TileState", is_whole: bool = False
    ) -> None:
        self.data = data
        self.written = written
        self.state = state
        self.is_whole = is_whole

    @property
    def address(self) -> int:
        return int(self.data.__array_interface__["data"][0])

    def __getitem__(self, index: Any) -> Any:
        state = self.state
        if state.product is not None:
            hooks.pending(self)
        state.used = ticks[0]
        if type(index) is not int and type(index) is not tuple and type(index) is not slice:
            index = int(index)
        if self.is_whole and type(index) is int and self.data.ndim == 1 and index >= 0:
            if index < len(self.data):
                return self.data[index]
        place = self.place(index)
        if place is None:
            return self._part(index)
        if not _is_inside(place, self.data.shape):
            return hooks.out_of_bounds(self, place if len(place) > 1 else place[0], False)
        if not self.is_whole and not self.written[place]:
            hooks.uninitialised(self, place if len(place) > 1 else place[0], "a local array")
        return self.data[place]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.state.product is not None:
            hooks.pending(self)
        place = self.place(index)
        if place is not None and not _is_inside(place, self.data.shape):
            hooks.out_of_bounds(self, place if len(place) > 1 else place[0], True)
            return
        self.state.used = ticks[0]
        at = index if place is None else place
        try:
            self.data[at] = getattr(value, "data", value) if place is None else value
        except OverflowError:
            self.data[at] = np.int64(value)
        if not self.is_whole:
            self.written[at] = True

    def _part(self, index: Any) -> "Local":
        parts = index if type(index) is tuple else (index,)
        for axis, one in enumerate(parts):
            if not isinstance(one, slice) and not 0 <= int(one) < self.data.shape[axis]:
                return hooks.out_of_bounds(self, int(one), False)  # type: ignore[no-any-return]
        return Local(self.data[index], self.written[index], self.state, self.is_whole)

    def reshape(self, *shape: Any) -> "Local":
        """The same elements in another shape."""
        return Local(self.data.reshape(*shape), self.written.reshape(*shape), self.state)


class TileState:
    """What async products do with a local array.

    Attributes:
        product: site of the product that works on it, None if there is none.
        group: agent and epoch of that product.
        used: tick of the thread's last own access, or of the declaration.
        name: what messages call it.
    """

    __slots__ = ("group", "name", "product", "used")

    def __init__(self, name: str) -> None:
        self.name = name
        self.product: int | None = None
        self.group = (0, 0)
        self.used = ticks[0]


def make_local(shape: Any, dtype: Any, name: str) -> Local:
    """A local array of undefined elements."""
    data = np.empty(shape, dtype)
    return Local(data, np.zeros(data.shape, np.bool_), TileState(name))
