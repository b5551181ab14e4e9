"""Run on a GPU: record what ops do, for the test that holds their twins to it.

    python -m tests.kernels.recorded.record

It writes ``h200.npz`` beside this file: the inputs and, by op, the outputs; and says where a twin
differs. The file is named after the GPU whose bytes twins promise.
"""

import sys

import numpy as np

from tests.kernels.recorded.calls import (
    THREADS,
    VECTORS,
    in_domain,
    make_inputs,
    make_kernel,
    num_outputs,
    recordable_ops,
    twin_outputs,
)

HOPPER = (9, 0)


def main() -> int:
    """Record everything; the number of ops whose twins differ is the exit status."""
    from numba import cuda

    from nbmoe_kernels.launcher import GpuExecutor

    executor = GpuExecutor()
    if executor.cc != HOPPER:
        print(f"the twins have Hopper's bits; this GPU has compute capability {executor.cc}")
        return 1
    inputs = make_inputs()
    held = {name: cuda.to_device(array.reshape(-1)) for name, array in inputs.items()}
    addresses = [held[name].device_ctypes_pointer.value for name in ("f32", "u32", "i32")]
    recorded, wrong = {}, 0
    for name, op in recordable_ops().items():
        out = cuda.to_device(np.zeros(num_outputs(op) * THREADS, np.uint32))
        arguments = (*addresses, out.device_ctypes_pointer.value)
        executor(make_kernel(op), (THREADS // 128, 1, 1), arguments, None)
        cuda.synchronize()
        recorded[name] = out.copy_to_host().reshape(-1, THREADS)
        differ = (recorded[name] != twin_outputs(op, inputs)) & in_domain(op, inputs)
        threads = np.flatnonzero(differ.any(axis=0))
        wrong += bool(threads.size)
        print(f"{name}: {threads.size} of {THREADS} threads differ {threads[:4]}")
    kept = {"f32": inputs["f32"], "u32": inputs["u32"]}
    np.savez_compressed(VECTORS, **{f"in_{k}": v for k, v in kept.items()}, **recorded)
    print(f"{len(recorded)} ops in {VECTORS} ({VECTORS.stat().st_size} bytes); {wrong} differ")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
