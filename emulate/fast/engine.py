"""Runs a compiled kernel: lays out a launch in memory and calls the hub."""

import ctypes
import time
from typing import Any

import numpy as np

from emulate.errors import ResourceError
from emulate.fast import records as rec
from emulate.fast import runtime, stacks
from emulate.fast.arguments import argument_types, pack
from emulate.fast.failure import failure
from emulate.fast.kernel import CompiledKernel, compiled
from emulate.options import MAX_SHARED_BYTES, Options, Shape, resident_blocks
from emulate.report import Report

MAX_LOCAL_BYTES = 40 * 1024
"""Local arrays of a kernel [bytes]: what a fiber's stack holds with room for everything else."""


def launch(function: Any, shape: Shape, args: tuple[Any, ...], options: Options) -> Report:
    """Run a kernel to its end; see `emulate.launch`."""
    kernel, known = compiled(function, argument_types(args), boundscheck=options.boundscheck)
    _check_limits(kernel, shape)
    slots, window = resident_blocks(options, shape)
    start = time.perf_counter()
    fibers = stacks.take(slots * shape.threads)
    try:
        memory = LaunchMemory(kernel, shape, args, options, fibers, slots, window)
        status = _hub()(memory.run.ctypes.data)
        if status != rec.HUB_DONE:
            raise failure(status, function, memory)
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


def _hub() -> Any:
    # A foreign call without the interpreter's lock: other Python threads go on.
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(runtime.address("emulate_hub"))


def _check_limits(kernel: CompiledKernel, shape: Shape) -> None:
    build = kernel.build
    total = _round_up(build.static_bytes, 16) + shape.shared_bytes
    if total > MAX_SHARED_BYTES:
        raise ResourceError(
            f"shared memory: expected at most {MAX_SHARED_BYTES} bytes, got {build.static_bytes} "
            f"static and {shape.shared_bytes} dynamic"
        )
    if build.local_bytes > MAX_LOCAL_BYTES:
        raise ResourceError(
            f"local arrays: expected at most {MAX_LOCAL_BYTES} bytes, got {build.local_bytes}"
        )


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
        self.warps = self._make_warps(kernel.build.exchange_bytes, slots)
        self.blocks = self._make_blocks(static_bytes, shared_bytes, slots)
        capacity = 1 << (slots * shape.threads).bit_length()
        self._queue = np.empty(capacity, np.int64)
        self.run = np.zeros(rec.RUN_BYTES // 8, np.int64)
        fields: dict[int, Any] = {
            rec.RUN_QUEUE: self._queue.ctypes.data,
            rec.RUN_MASK: capacity - 1,
            rec.RUN_ARGUMENTS: self.arguments.ctypes.data,
            rec.RUN_SEED: _generator_state(options.seed),
            rec.RUN_LAZY: options.copies == "lazy",
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

    def _make_warps(self, exchange_bytes: int, slots: int) -> np.ndarray:
        threads = self.shape.threads
        count = -(-threads // rec.WARP_LANES)
        warps = np.zeros((slots, count, rec.WARP_BYTES // 8), np.int64)
        self._exchange = _aligned(slots * count * 2 * exchange_bytes, 64)
        index = np.arange(slots * count).reshape(slots, count)
        address = self._exchange.ctypes.data + index * 2 * exchange_bytes
        warps[:, :, rec.WARP_EXCHANGE // 8] = address
        warps[:, :, rec.WARP_HALF // 8] = exchange_bytes
        lanes = np.minimum(threads - rec.WARP_LANES * np.arange(count), rec.WARP_LANES)
        warps[:, :, rec.WARP_SIZE // 8] = lanes
        return warps

    def _make_blocks(self, static_bytes: int, shared_bytes: int, slots: int) -> np.ndarray:
        blocks = np.zeros((slots, rec.BLOCK_BYTES // 8), np.int64)
        index = np.arange(slots)
        shared = self._shared.ctypes.data + index * shared_bytes
        blocks[:, rec.BLOCK_SHARED // 8] = shared
        blocks[:, rec.BLOCK_DYNAMIC // 8] = shared + static_bytes
        blocks[:, rec.BLOCK_DYNAMIC_BYTES // 8] = self.shape.shared_bytes
        stack = index * self.shape.threads * rec.STACK_BYTES
        blocks[:, rec.BLOCK_STACKS // 8] = self.fibers.base + stack
        warps = index * self.warps.strides[0]
        blocks[:, rec.BLOCK_WARPS // 8] = self.warps.ctypes.data + warps
        return blocks


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
