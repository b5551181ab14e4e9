"""P1: codecs equal NVIDIA's own conversion headers, compiled for the host."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nbmoe import codecs

SOURCE = r"""
#include <cuda_runtime_api.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_fp4.h>
#define EACH(name, type, expression)                                      \
    extern "C" void name(const float* x, type* out, long n) {             \
        for (long i = 0; i < n; ++i) out[i] = expression;                 \
    }
typedef unsigned char u8;
EACH(e2m1, u8, __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest))
EACH(e4m3, u8, __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3))
EACH(e5m2, u8, __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2))
EACH(e8m0, u8, __nv_cvt_float_to_e8m0(x[i], __NV_SATFINITE, cudaRoundPosInf))
EACH(bf16, unsigned short, __nv_bfloat16_raw(__float2bfloat16_rn(x[i])).x)
extern "C" unsigned char pair(float even, float odd) {
    return __nv_cvt_float2_to_fp4x2(make_float2(even, odd), __NV_E2M1, cudaRoundNearest);
}
"""


def header_folders():
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations] if spec else []
    return [
        path
        for root in roots
        for header in ("cuda_fp4.h", "crt/host_defines.h", "nv/target")
        for path in (found.parents[header.count("/")] for found in root.rglob(header))
    ]


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """The conversions of cuda_fp4.h, cuda_fp8.h and cuda_bf16.h as a C library."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: NVIDIA's conversion headers cannot be compiled")
    folders = header_folders()
    if not any((folder / "cuda_fp4.h").exists() for folder in folders):
        pytest.skip("no cuda_fp4.h: install nvidia-cuda-runtime, nvidia-cuda-crt, nvidia-cuda-cccl")
    folder = tmp_path_factory.mktemp("nvidia_headers")
    (folder / "convert.cpp").write_text(SOURCE)
    includes = [f"-I{path}" for path in dict.fromkeys(folders)]
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", *includes]
    subprocess.run([*command, "convert.cpp", "-o", "convert.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "convert.so"))
    library.pair.argtypes = [ctypes.c_float, ctypes.c_float]
    library.pair.restype = ctypes.c_ubyte
    return library


def inputs():
    """Every bf16 and its float32 neighbours, every f16, random patterns, normal values."""
    rng = np.random.default_rng(3)
    bf16 = np.arange(1 << 16, dtype=np.int64) << 16
    patterns = np.concatenate(
        [
            (bf16[:, None] + np.array([-1, 0, 1, 0x8000])).ravel() % (1 << 32),
            np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
            rng.integers(0, 1 << 32, 200_000),
            (3 * rng.standard_normal(200_000)).astype(np.float32).view(np.uint32),
        ]
    )
    return patterns.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("e2m1", codecs.encode_e2m1),
        ("e4m3", codecs.encode_e4m3),
        ("e5m2", codecs.encode_e5m2),
        ("e8m0", codecs.ceil_e8m0),
        ("bf16", lambda x: codecs.encode_bf16(x).view(np.uint16)),
    ],
)
def test_encode_equals_nvidia(nvidia, name, ours):
    x = np.ascontiguousarray(inputs())
    got = ours(x)
    expected = np.empty_like(got)
    pointer = ctypes.c_void_p
    convert = getattr(nvidia, name)
    convert(pointer(x.ctypes.data), pointer(expected.ctypes.data), ctypes.c_long(x.size))
    assert x.size > 700_000
    different = np.flatnonzero(got != expected)
    assert different.size == 0, (x[different[:5]], got[different[:5]], expected[different[:5]])


def test_nibble_order_equals_nvidia(nvidia):
    rng = np.random.default_rng(4)
    for even, odd in 4 * rng.standard_normal((200, 2)).astype(np.float32):
        packed = codecs.pack_nibbles(codecs.encode_e2m1(np.array([even, odd])))
        assert packed.tolist() == [nvidia.pair(even, odd)]
