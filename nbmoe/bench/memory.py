"""Arrays of random bytes, made where the kernels run: a layer has billions of them."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nbmoe.arrays import to_backend, to_numpy
from nbmoe.layouts import TILE_COLUMNS, TILE_ROWS, TILE_SHAPE, ceil_div

Array = npt.NDArray[Any]

POOL = 16 * 262_147
"""Random elements that are repeated; no power of two, so that rows do not repeat."""

BF16 = np.dtype(ml_dtypes.bfloat16)
_SIGN = 0x80


class Memory:
    """Makes arrays on a GPU, or on the host for tests.

    Args:
        on_gpu: Where.
        seed: Of the random elements.
    """

    def __init__(self, on_gpu: bool = True, seed: int = 0) -> None:
        self.on_gpu = on_gpu
        self._seed = seed

    def put(self, array: Array) -> Any:
        """An array of the host, moved."""
        return to_backend(array, "gpu") if self.on_gpu else np.ascontiguousarray(array)

    def read(self, array: Any, dtype: Any = None) -> Array:
        """An array as numpy."""
        return to_numpy(array, dtype)

    def clear(self, array: Any) -> None:
        """Sets every byte to 0, so that bytes that no kernel writes are the same on every run."""
        if not self.on_gpu:
            array.view(np.uint8)[...] = 0
            return
        from cuda.bindings import driver

        start = int(array.__cuda_array_interface__["data"][0])
        (error,) = driver.cuMemsetD8(start, 0, array.nbytes)
        driver.cuCtxSynchronize()  # a launch on a stream of its own does not wait for the clearing
        if int(error):
            raise RuntimeError(f"the CUDA driver cannot clear {array.nbytes} bytes: {error!r}")

    def codes(self, *shape: int) -> Any:
        """Bytes of either sign whose low seven bits are below 0x78: no NaN of e4m3."""
        return self._repeat("codes", shape)

    def bf16(self, *shape: int) -> Any:
        """bf16 of either sign, from 2**-7 to 1."""
        array = self._repeat("bf16", shape)
        return array if self.on_gpu else array.view(BF16)

    def factors(self, *shape: int) -> Any:
        """float32 from 0.5 to 1.5."""
        return self._repeat("factors", shape)

    def tokens(self, rows: int, columns: int) -> Any:
        """bf16, standard normal."""
        array = self._repeat("normal", (rows, columns))
        return array if self.on_gpu else array.view(BF16)

    def block_scales(self, scale: str, experts: int, rows: int, columns: int) -> Any:
        """Scale tiles of weights, with scales of about 2**-6: "e4m3" or "e8m0"."""
        tiles = (ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS), *TILE_SHAPE)
        return self._repeat(scale, (experts, *tiles))

    def _repeat(self, kind: str, shape: tuple[int, ...]) -> Any:
        pool = _pool(kind, self._seed)
        if not self.on_gpu:
            repeated: Array = np.resize(pool, shape)
            return repeated
        from cuda.bindings import driver
        from numba import cuda

        array = cuda.device_array(shape, pool.dtype)
        nbytes, filled = array.nbytes, min(array.nbytes, pool.nbytes)
        if nbytes:
            start = int(array.__cuda_array_interface__["data"][0])
            (error,) = driver.cuMemcpyHtoD(start, pool.ctypes.data, filled)
            while filled < nbytes and not int(error):
                count = min(filled, nbytes - filled)
                (error,) = driver.cuMemcpyDtoD(start + filled, start, count)
                filled += count
            if int(error):
                raise RuntimeError(f"the CUDA driver cannot fill {nbytes} bytes: {error!r}")
        return array


@functools.cache
def _pool(kind: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "factors":
        return (rng.random(POOL, np.float32) + np.float32(0.5)).astype(np.float32)
    if kind == "normal":
        values = rng.standard_normal(POOL, np.float32)
        return values.astype(BF16).view(np.uint16)
    sign = rng.integers(0, 2, POOL, np.uint8)
    if kind == "codes":
        return rng.integers(0, 0x78, POOL, np.uint8) | sign * np.uint8(_SIGN)
    if kind == "bf16":
        magnitude = rng.integers(0x3C00, 0x3F80, POOL, np.uint16)
        signed: Array = magnitude | sign.astype(np.uint16) << np.uint16(15)
        return signed
    low, high = {"e4m3": (0x08, 0x20), "e8m0": (119, 123)}[kind]
    return rng.integers(low, high, POOL, np.uint8)


def digest(arrays: list[Array]) -> str:
    """Eight bytes of the SHA-256 of arrays, as hexadecimal."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).view(np.uint8).data)
    return sha.hexdigest()[:16]
