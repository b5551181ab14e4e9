"""What the card itself does: copies, large quantizations, and what a launch costs the host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from nbmoe import ops
from nbmoe.bench.entry import step
from nbmoe.bench.launches import SCRATCH_BYTES, launchers
from nbmoe.bench.memory import Memory
from nbmoe.bench.timing import Timer
from nbmoe.layouts import scales_offset

QUANTIZED = ((32768, 2048, 128), (65536, 4096, 64))
"""Rows, columns and experts of large grouped quantizations."""
_NVFP4_BYTES = 2 + 1 / 2 + 1 / 16
"""Read and written for an element of bf16 that becomes NVFP4."""


def facts(timer: Timer) -> dict[str, Any]:
    """Name, driver and CUDA version of the card."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    return {
        "card": timer.device.name,
        "driver": _driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip()


def measure(timer: Timer, memory: Memory) -> Iterator[dict[str, Any]]:
    """An empty graph, a copy, large quantizations beside it, and launches.

    What fails says so; the rest goes on.
    """
    for part in (_empty, _copy, _quantize, _launches):
        try:
            yield from part(timer, memory)
        except Exception as error:
            yield {"case": part.__name__.strip("_"), "note": f"{type(error).__name__}: {error}"}
        timer.forget()


def _empty(timer: Timer, memory: Memory) -> Iterator[dict[str, Any]]:
    yield {"case": "empty graph", "us": asdict(timer.measure(timer.empty()))}


def _copy(timer: Timer, memory: Memory) -> Iterator[dict[str, Any]]:
    nbytes = 512 << 20
    source = timer.device.allocate(nbytes, stream=timer.stream)
    target = timer.device.allocate(nbytes, stream=timer.stream)

    def copy(stream: Any) -> None:
        target.copy_from(source, stream=stream)

    yield _transfer(timer, "copy of 512 MiB", 2 * nbytes, copy)


def _quantize(timer: Timer, memory: Memory) -> Iterator[dict[str, Any]]:
    for rows, columns, experts in QUANTIZED:
        starts = np.linspace(0, rows, experts + 1).astype(np.uint32)
        host = starts, scales_offset(starts), np.arange(experts, dtype=np.int32)
        slots = [memory.put(a) for a in (*host, np.ones(experts, np.float32))]
        x = memory.tokens(rows, columns)
        quantize = step(ops.grouped_quantize_dynamic_block_scaled, x, *slots)
        name = f"grouped quantize to NVFP4, {rows} x {columns}, {experts} experts"
        yield _transfer(timer, name, rows * columns * _NVFP4_BYTES, quantize.call)


def _launches(timer: Timer, memory: Memory) -> Iterator[dict[str, Any]]:
    scratch = timer.device.allocate(SCRATCH_BYTES, stream=timer.stream)
    scratch.fill(0, stream=timer.stream)
    for name, call in launchers(int(scratch.handle)).items():
        yield {"case": f"host time of launching {name}", "us": asdict(timer.host(call))}


def _transfer(timer: Timer, name: str, moved: float, call: Callable[[Any], Any]) -> dict[str, Any]:
    times = timer.measure(timer.capture(call))
    return {"case": name, "us": asdict(times), "TB/s": moved / times.dirty.median / 1e6}


def line(fact: dict[str, Any]) -> str:
    """A measurement on a terminal."""
    if "us" not in fact:
        return f"{fact['case']:<60} {fact['note']}"
    us = fact["us"]
    both = f"{us['dirty']['median']:.1f} / {us['clean']['median']:.1f}" if "dirty" in us else ""
    text = both or f"{us['median']:.1f}"
    rate = f"{fact['TB/s']:.2f} TB/s" if "TB/s" in fact else ""
    return f"{fact['case']:<60} {text:>16} us  {rate}".rstrip()
