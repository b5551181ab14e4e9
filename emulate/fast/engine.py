"""Runs a compiled kernel: lays out a launch in memory and calls the hub."""

import ctypes
import time
from typing import Any

import numpy as np

from emulate.errors import KernelError, ResourceError, UnsupportedOp
from emulate.fast import records as rec
from emulate.fast import runtime, stacks
from emulate.fast.arguments import argument_types, pack
from emulate.fast.failure import failure
from emulate.fast.kernel import CompiledKernel, compiled
from emulate.fast.switch import check_platform
from emulate.options import MAX_STATIC_BYTES, Options, Shape, resident_blocks, shared_limit
from emulate.report import Report

MAX_LOCAL_BYTES = 40 * 1024
"""Local arrays of a kernel [bytes]: what a fiber's stack holds with room for everything else."""

FIRST_SLICE = 20_000
"""Switches of the first slice of a launch."""
SLICE_SECONDS = 0.1
"""How long the following ones are to take [s]."""

_COPY_MODES = {
    "eager": rec.COPIES_EAGER,
    "lazy": rec.COPIES_LAZY,
    "random": rec.COPIES_RANDOM,
}


def launch(function: Any, shape: Shape, args: tuple[Any, ...], options: Options) -> Report:
    """Run a kernel to its end; see `emulate.launch`."""
    check_platform()
    kernel, known = compiled(function, argument_types(args), boundscheck=options.boundscheck)
    _check_limits(kernel, shape, options)
    slots, window = resident_blocks(options, shape)
    start = time.perf_counter()
    fibers = stacks.take(slots * shape.threads)
    try:
        guarded = ReadOnlyArguments(args)
        memory = LaunchMemory(kernel, shape, guarded.args, options, fibers, slots, window)
        status = _run(memory.run)
        if status != rec.HUB_DONE:
            raise failure(status, function, memory)
        guarded.check(function)
    finally:
        stacks.give_back(fibers)
    return Report(
        engine="fast",
        seconds=time.perf_counter() - start,
        compile_seconds=0.0 if known else kernel.seconds,
        cached=known or kernel.cached,
        blocks=shape.blocks,
        resident=int(memory.run[rec.RUN_USED // 8]),
    )


def _run(run: np.ndarray) -> int:
    """Run the hub to the launch's end, in slices, so that Python's signal handlers run too."""
    # A foreign call without the interpreter's lock: other Python threads go on.
    hub = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(runtime.address("emulate_hub"))
    address = run.ctypes.data
    budget = FIRST_SLICE
    while True:
        run[rec.RUN_BUDGET // 8] = budget
        start = time.perf_counter()
        status = int(hub(address))
        if status != rec.HUB_PAUSED:
            return status
        taken = time.perf_counter() - start
        budget = max(int(budget * min(SLICE_SECONDS / max(taken, 1e-6), 8.0)), 1)


def _check_limits(kernel: CompiledKernel, shape: Shape, options: Options) -> None:
    build = kernel.build
    total = _round_up(build.static_bytes, 16) + shape.shared_bytes
    limit = shared_limit(options.cc)
    if total > limit:
        raise ResourceError(
            f"shared memory: expected at most {limit} bytes on compute capability "
            f"{options.cc[0]}.{options.cc[1]}, got {build.static_bytes} static and "
            f"{shape.shared_bytes} dynamic"
        )
    if build.static_bytes > MAX_STATIC_BYTES:
        raise ResourceError(
            f"static shared memory: expected at most {MAX_STATIC_BYTES} bytes, got "
            f"{build.static_bytes}; more has to be dynamic: shared.array(0, dtype)"
        )
    if build.local_bytes > MAX_LOCAL_BYTES:
        raise ResourceError(
            f"local arrays: expected at most {MAX_LOCAL_BYTES} bytes, got {build.local_bytes}"
        )
    if tuple(build.min_cc) > options.cc:
        raise UnsupportedOp(
            f"{build.min_cc_op} needs compute capability {build.min_cc[0]}.{build.min_cc[1]}, the "
            f"launch has cc={options.cc}"
        )


class ReadOnlyArguments:
    """A kernel's arguments, with private copies of arrays that it may not change.

    Machine code knows no read-only arrays: one kernel serves both, and what it must not write is
    compared afterwards. An array that shares memory with one that may be written is left as it is.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        writable = [array for array in arrays if array.flags.writeable]
        self._originals: dict[int, np.ndarray] = {}
        values = list(args)
        for i, arg in enumerate(args):
            if not isinstance(arg, np.ndarray) or arg.flags.writeable:
                continue
            if not any(np.may_share_memory(arg, other) for other in writable):
                self._originals[i] = arg
                values[i] = arg.copy(order="K")
        self.args = tuple(values)

    def check(self, function: Any) -> None:
        """Compare.

        Raises:
            KernelError: the kernel wrote to a read-only array.
        """
        for i, original in self._originals.items():
            if not _same_bytes(original, self.args[i]):
                raise KernelError(f"{function.__name__} wrote to argument {i}, a read-only array")


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if a.flags.c_contiguous or a.flags.f_contiguous:
        flat_a, flat_b = a.reshape(-1, order="A"), b.reshape(-1, order="A")
        return bool((flat_a.view(np.uint8) == flat_b.view(np.uint8)).all())
    return a.tobytes() == b.tobytes()


class LaunchMemory:
    """The records of one launch, and the memory of its CTAs."""

    def __init__(
        self,
        kernel: CompiledKernel,
        shape: Shape,
        args: tuple[Any, ...],
        options: Options,
        fibers: stacks.Stacks,
        slots: int,
        window: int,
    ) -> None:
        self.shape = shape
        self.fibers = fibers
        self.arguments = pack(args)
        self._kept = args
        static_bytes = _round_up(kernel.build.static_bytes, 1024)
        shared_bytes = static_bytes + _round_up(shape.shared_bytes, 1024)
        self._shared = _aligned(slots * shared_bytes, 1024)
        build = kernel.build
        self.warps = Units(
            rec.WARP_LANES, shape.threads, slots, build.warp_exchange, build.warp_product
        )
        self.warpgroups = Units(
            rec.WARPGROUP_LANES,
            shape.threads,
            slots,
            build.warpgroup_exchange,
            build.warpgroup_product,
        )
        self._flights = np.empty(rec.FLIGHT_RING * rec.FLIGHT_BYTES // 8, np.int64)
        self.blocks = self._make_blocks(static_bytes, shared_bytes, slots)
        capacity = 1 << (slots * shape.threads).bit_length()
        self._queue = np.empty(capacity, np.int64)
        self.run = np.zeros(rec.RUN_BYTES // 8, np.int64)
        fields: dict[int, Any] = {
            rec.RUN_QUEUE: self._queue.ctypes.data,
            rec.RUN_MASK: capacity - 1,
            rec.RUN_ARGUMENTS: self.arguments.ctypes.data,
            rec.RUN_SEED: _generator_state(options.seed),
            rec.RUN_COPIES: _COPY_MODES[options.copies],
            rec.RUN_COPY_SEED: _generator_state(options.seed or 0),
            rec.RUN_FLIGHTS: self._flights.ctypes.data,
            rec.RUN_THREADS: shape.threads,
            rec.RUN_ENTRY: kernel.entry,
            rec.RUN_BLOCKS: shape.blocks,
            rec.RUN_SLOTS: slots,
            rec.RUN_WINDOW: window,
            rec.RUN_SLOT: self.blocks.ctypes.data,
            rec.RUN_SHARED_BYTES: shared_bytes,
        }
        for axis in range(3):
            fields[rec.RUN_GRID + 8 * axis] = shape.grid[axis]
            fields[rec.RUN_BLOCK + 8 * axis] = shape.block[axis]
        for offset, value in fields.items():
            self.run[offset // 8] = value

    def _make_blocks(self, static_bytes: int, shared_bytes: int, slots: int) -> np.ndarray:
        blocks = np.zeros((slots, rec.BLOCK_BYTES // 8), np.int64)
        index = np.arange(slots)
        shared = self._shared.ctypes.data + index * shared_bytes
        blocks[:, rec.BLOCK_SHARED // 8] = shared
        blocks[:, rec.BLOCK_DYNAMIC // 8] = shared + static_bytes
        blocks[:, rec.BLOCK_DYNAMIC_BYTES // 8] = self.shape.shared_bytes
        stack = index * self.shape.threads * rec.STACK_BYTES
        blocks[:, rec.BLOCK_STACKS // 8] = self.fibers.base + stack
        for field, units in (
            (rec.BLOCK_WARPS, self.warps.records),
            (rec.BLOCK_WARPGROUPS, self.warpgroups.records),
        ):
            blocks[:, field // 8] = units.ctypes.data + index * units.strides[0]
        return blocks


class Units:
    """The warps or the warpgroups of all slots, with their exchanges and product records."""

    def __init__(self, lanes: int, threads: int, slots: int, exchange: int, product: int) -> None:
        count = -(-threads // lanes)
        self.records = np.zeros((slots, count, rec.UNIT_BYTES // 8), np.int64)
        exchange, product = _round_up(exchange, 64), _round_up(product, 64)
        # Two halves in turn, and a third one for async products, which complete in between.
        ring = rec.PRODUCT_RING * product
        each = 2 * exchange + (exchange + ring if product else 0)
        self._memory = _aligned(slots * count * each, 64)
        index = np.arange(slots * count).reshape(slots, count)
        address = self._memory.ctypes.data + index * each
        present = np.minimum(threads - lanes * np.arange(count), lanes)
        fields: dict[int, Any] = {
            rec.UNIT_EXCHANGE: address,
            rec.UNIT_HALF: exchange,
            rec.UNIT_SIZE: present,
            rec.UNIT_LANES: lanes,
            rec.UNIT_STAGE: address + 2 * exchange,
            rec.UNIT_PRODUCTS: address + 3 * exchange,
            rec.UNIT_PRODUCT_BYTES: product,
        }
        for offset, value in fields.items():
            self.records[:, :, offset // 8] = value


def _generator_state(seed: int | None) -> int:
    # Not 0, which xorshift never leaves; splitmix64's first step spreads small seeds.
    if seed is None:
        return 0
    return (((int(seed) + 1) * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF) | 1


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _aligned(nbytes: int, alignment: int) -> np.ndarray:
    memory = np.empty(nbytes + alignment, np.uint8)
    skip = -memory.ctypes.data % alignment
    return memory[skip : skip + nbytes]
