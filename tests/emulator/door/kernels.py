"""Run in a process with Numba's simulator: python -m tests.emulator.door.kernels ENGINE NAME."""

import sys

import numpy as np
from numba import cuda

import emulate
import emulate.door
from tests.emulator import small_ops as ops

ENGINE = sys.argv[1]
emulate.door.install(ENGINE)


@cuda.jit(device=True, inline=True)
def double(v):
    return np.uint32(v + v)


@cuda.jit("void(uint32[:], uint32[:], uint32)", lto=True, max_registers=64)
def stages(x, y, scale):
    # Two arrays on one line: the stock simulator takes them for one.
    part, other = cuda.shared.array(64, np.uint32, alignment=16), cuda.shared.array(64, np.uint32)
    dynamic = cuda.shared.array(0, np.uint32)
    mine = cuda.local.array(2, np.uint32, alignment=8)
    t = cuda.threadIdx.x
    other[t] = 1000
    part[t] = double(ops.shuffle_down(x[t], np.uint32(1)))
    dynamic[t] = ops.rotate(x[t], np.uint32(31))
    mine[0] = np.uint32(t - 1)  # wraps in thread 0
    cuda.syncthreads()
    y[t] = np.uint32(part[63 - t] * scale + dynamic[t ^ 1] + (mine[0] >> 31))
    votes = cuda.syncthreads_count(t < 10)
    if t == 0:
        y[64] = votes
    cuda.atomic.add(y, 65, x[t])


def launch_stages():
    x = np.arange(64, dtype=np.uint32)
    device_x, y = cuda.to_device(x), cuda.to_device(np.zeros(66, np.uint32))
    stream = cuda.stream()
    stages[1, 64, stream, 256](device_x, y, np.uint32(3))
    stream.synchronize()
    result = y.copy_to_host()
    down = [min(32 * (i // 32) + 31, i + 1) for i in range(64)]
    rotated = [((i << 31) | (i >> 1)) & 0xFFFFFFFF for i in range(64)]
    for t in range(64):
        expected = 6 * down[63 - t] + rotated[t ^ 1] + (t == 0)
        assert int(result[t]) == expected & 0xFFFFFFFF, (t, result[t], expected)
    assert result[64] == 10 and result[65] == 63 * 32


@cuda.jit
def warps(x, out):
    t = cuda.grid(1)
    cuda.syncwarp()
    out[t] = cuda.shfl_xor_sync(0xFFFFFFFF, x[t], 3)
    if cuda.ballot_sync(0xFFFFFFFF, x[t] % 2 == 0) != 0x55555555:
        out[t] = -1


def launch_warps():
    """Stock warp functions, which the stock simulator lacks; host arrays; two CTAs."""
    x = np.arange(128, dtype=np.int32)
    out = np.zeros(128, np.int32)
    warps[2, 64](cuda.In(x), cuda.Out(out))
    assert out.tolist() == [i ^ 3 for i in range(128)], out


@cuda.jit(launch_bounds=(64, 1))
def copies(x, y):
    part = cuda.shared.array(64, np.uint32)
    t = cuda.threadIdx.x
    ops.copy_word(part, t, x, t)
    ops.copy_commit()
    ops.copy_wait_all()
    cuda.syncthreads()
    y[t] = part[63 - t]


def launch_copies():
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    copies[1, 64](x, y)
    assert y.tolist() == list(range(63, -1, -1))


@cuda.jit
def divergent(x):
    if cuda.threadIdx.x < 16:
        ops.ballot(np.uint32(1))
    else:
        x[cuda.threadIdx.x] = ops.shuffle_down(np.uint32(1), np.uint32(1))


def launch_divergent():
    try:
        divergent[1, 32](np.zeros(32, np.uint32))
    except emulate.FindingError as error:
        assert ENGINE == "checked" and "COLLECTIVE_DIVERGENT" in error.ids
    except emulate.CollectiveDivergence:
        assert ENGINE != "checked"
    else:
        raise AssertionError("lanes in two collectives went unnoticed")


@cuda.jit
def out_of_bounds(x):
    x[cuda.threadIdx.x + 1] = 1


def launch_out_of_bounds():
    try:
        out_of_bounds[1, 32](np.zeros(32, np.uint32))
    except emulate.FindingError as error:
        assert ENGINE == "checked" and error.ids == ("OOB_WRITE",)
    except (emulate.KernelError, IndexError) as error:
        assert "out of bounds" in str(error)
    else:
        raise AssertionError("an index out of bounds went unnoticed")


def launch_gemm():
    """The warp-specialised Hopper GEMM: TMA, mbarriers, wgmma, registers handed over."""
    from emulate.bench.hopper_gemm import hopper_gemm, make_problem

    problem = make_problem(128, 256, 128)
    kernel = hopper_gemm("e4m3", stages=2)
    map_a, map_b, *rest = problem.arguments()
    args = [
        cuda.to_device(arg) if isinstance(arg, np.ndarray) else arg
        for arg in (map_a.copy(), map_b.copy(), *rest)
    ]
    launcher = cuda.jit(kernel.py_func, launch_bounds=(kernel.threads, 1))
    launcher[1, kernel.threads, cuda.stream(), kernel.shared_bytes](*args)
    assert (args[2].copy_to_host() == problem.expected()).all()


def launch_uninstall():
    """The simulator is as it was, and `install` can be called again."""
    emulate.door.uninstall()
    try:
        cuda.jit(launch_bounds=(64, 1))(lambda x: None)
    except TypeError:
        pass
    else:
        raise AssertionError("the stock simulator accepts launch_bounds")
    emulate.door.install(ENGINE)
    emulate.door.install("interpreted")
    launch_copies()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        globals()[f"launch_{name}"]()
        print(name)
