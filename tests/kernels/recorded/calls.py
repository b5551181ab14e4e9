"""Fixed inputs for ops without memory, a kernel that runs an op on them, and the twin's answers.

The same 2048 threads, 64 warps, for every op. The n-th scalar operand of a thread comes from row n
of its type's inputs; one that must be equal on a warp is what the warp's first thread has.
"""

import linecache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from nbmoe_kernels.device.op import NUMPY_TYPES, STUBS, Op, Param, Scope
from nbmoe_kernels.kernel import Kernel, kernel
from tests.kernels.all_ops import all_ops

VECTORS = Path(__file__).parent / "h200.npz"
THREADS = 2048
WARP = 32
_ROWS = 6
Arrays = dict[str, np.ndarray]

# Zero, subnormals, edges of f16 and e4m3, ties, integers, infinity and NaNs.
_SPECIAL = """
00000000 00000001 007FFFFF 00800000 33800000 38800000 3C7FFFFF 3F000000 3F7FFFFF 3F800000 3F800001
3FC00000 43E00000 43E80000 477FE000 477FF000 4B000000 4B000001 4F000000 7F000000 7F7FFFFF 7F800000
7F800001 7FC00000
"""

# Operands that an op does not promise anything about.
DOMAINS = {
    "min_abs": lambda a, b: b >= 0,
    "mul_abs_sat": lambda a, b: (b >= 0) & ~np.signbit(b),
    "permute_bytes": lambda a, b, selector: selector & 0x8888 == 0,
    "reciprocal_usual": lambda x: (x == 0) | ((x >= 2.0**-100) & (x <= 2.0**100)),
}


def recordable_ops() -> dict[str, Op]:
    """Ops of a thread or a warp with an instruction and a result, that touch no memory."""
    return {
        name: op
        for name, op in all_ops().items()
        if op.scope is not Scope.WARPGROUP
        and op.ptx.strip("{ }")
        and not any(p.is_pointer for p in op.params)
        and (op.result or any(p.kind == "tile" for p in op.params))
    }


def make_inputs(seed: int = 0) -> Arrays:
    """Inputs by type, (rows, threads): special values against each other, then random ones."""
    rng = np.random.default_rng(seed)
    bits = np.array([int(word, 16) for word in _SPECIAL.split()], np.uint32)
    special = np.concatenate([bits, bits | np.uint32(1 << 31)])
    near = rng.standard_normal((_ROWS, THREADS)) * np.exp2(rng.integers(-12, 12, (_ROWS, THREADS)))
    floats = near.astype(np.float32).view(np.uint32)
    # Pairs (and, shuffled, triples) of special values in the first rows' first half.
    count = THREADS // 2
    pairs = rng.permutation(len(special) ** 2)[:count]
    floats[0, :count], floats[1, :count] = (
        special[pairs // len(special)],
        special[pairs % len(special)],
    )
    floats[2, :count:3] = special[rng.integers(0, len(special), floats[2, :count:3].shape)]
    floats[:, count : count + 512] = rng.integers(0, 2**32, (_ROWS, 512), dtype=np.uint64)
    words = rng.integers(0, 2**32, (_ROWS, THREADS), dtype=np.uint64).astype(np.uint32)
    # By warps: any bits; no Inf or NaN of f16 and bf16; few values; one value; one odd lane.
    warp = np.arange(THREADS) // WARP
    words[:, warp % 8 == 1] &= np.uint32(0xBFFFBFFF)
    words[:, warp % 8 == 2] &= np.uint32(0xBFBFBFBF)
    words[:, warp % 8 == 3] %= np.uint32(3)
    words[:, warp % 8 == 4] = 77
    words[:, warp % 8 == 5] = 0
    words[:, (warp % 8 == 6) & (np.arange(THREADS) % WARP != warp)] = 0
    # Byte selectors.
    words[2, ::2] &= np.uint32(0x7777)
    return {"f32": floats.view(np.float32), "u32": words, "i32": words.view(np.int32)}


def _rows(op: Op) -> list[tuple[Param, int]]:
    """Each operand's first row of inputs; a tile takes several."""
    taken: dict[str, int] = {}
    rows = []
    for p in op.params:
        rows.append((p, taken.get(p.dtype, 0) % _ROWS))
        taken[p.dtype] = taken.get(p.dtype, 0) + max(p.length, 1)
    return rows


def make_kernel(op: Op) -> Kernel:
    """A kernel (inputs f32, u32, i32, out u32) that runs the op on every thread's inputs."""
    from numba import cuda

    stub = STUBS[op.name]
    lines = [
        "def record_op(f32, u32, i32, out):",
        "    lane = np.uint64(cuda.blockIdx.x * np.uint32(128) + cuda.threadIdx.x)",
        "    first = np.uint64(lane & ~np.uint64(31))",
    ]
    arguments, values = [], []
    for p, row in _rows(op):
        dtype = f"np.{NUMPY_TYPES[p.dtype].__name__}"
        if p.kind == "tile":
            lines.append(f"    {p.name} = cuda.local.array({p.length}, {dtype})")
            for i in range(p.length):
                at = f"np.uint64({(row + i) % _ROWS * THREADS}) + lane"
                lines.append(f"    {p.name}[{i}] = {p.dtype}[{at}]")
                values.append((f"{p.name}[{i}]", p.dtype))
        else:
            place = "first" if p.uniform else "lane"
            lines.append(f"    {p.name} = {p.dtype}[np.uint64({row * THREADS}) + {place}]")
        arguments.append(p.name)
    call = f"stub({', '.join(arguments)})"
    if op.result:
        names = [f"r{i}" for i in range(max(op.result[1], 1))]
        call = f"{', '.join(names)} = {call}"
        values += [(name, op.result[0]) for name in names]
    lines.append(f"    {call}")
    for i, (value, dtype) in enumerate(values):
        bits = f"f32_bits({value})" if dtype == "f32" else f"np.uint32({value})"
        lines.append(f"    out[np.uint64({i * THREADS}) + lane] = {bits}")
    namespace: dict[str, Any] = {
        "np": np,
        "cuda": cuda,
        "stub": stub,
        "f32_bits": STUBS["f32_bits"],
        "__name__": __name__,
    }
    # The compiler's cache reads the kernel's source.
    source, file = "\n".join(lines) + "\n", f"<record {op.name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), namespace)
    params = "global f32* f32, global u32* u32, global i32* i32, global u32* out"
    made = kernel(params, threads=128, name=f"record_{op.name}", min_cc=op.min_cc)
    return made(namespace["record_op"])


def num_outputs(op: Op) -> int:
    """Words a thread of `make_kernel` writes."""
    tiles = sum(p.length for p in op.params if p.kind == "tile")
    return tiles + (max(op.result[1], 1) if op.result else 0)


def twin_outputs(op: Op, inputs: Arrays) -> np.ndarray:
    """What the twin gives, u32 (outputs, threads), as the kernel writes it."""
    twin = njit(error_model="numpy")(op.twin)
    if op.scope is Scope.THREAD:
        return _thread_outputs(op, twin, inputs)
    columns = []
    for first in range(0, THREADS, WARP):
        lanes = slice(first, first + WARP)
        arguments, parts = [], []
        for p, row in _rows(op):
            source = inputs[p.dtype]
            if p.kind == "tile":
                rows = [(row + i) % _ROWS for i in range(p.length)]
                arguments.append(np.ascontiguousarray(source[rows, lanes].T))
            elif p.uniform:
                arguments.append(source[row, first])
            else:
                arguments.append(np.ascontiguousarray(source[row, lanes]))
        result = twin(*arguments)
        tiles = (a for a, p in zip(arguments, op.params, strict=True) if p.kind == "tile")
        parts += [tile.view(np.uint32).T for tile in tiles]
        if op.result:
            parts.append(result.reshape(WARP, -1).view(np.uint32).T)
        columns.append(np.concatenate(parts))
    return np.concatenate(columns, axis=1)


def _thread_outputs(op: Op, twin: Any, inputs: Arrays) -> np.ndarray:
    # A Python float would make a signalling NaN quiet: numbers stay in compiled code.
    names = [p.name for p in op.params]
    values = ", ".join(f"{name}[i]" for name in names)
    lines = [f"def run({', '.join(names)}, out):", "    for i in range(out.size):"]
    scope = {"twin": twin}
    exec("\n".join([*lines, f"        out[i] = twin({values})"]), scope)
    assert op.result and not op.result[1] and all(p.kind == "scalar" for p in op.params)
    out = np.empty(THREADS, NUMPY_TYPES[op.result[0]])
    arguments = (np.ascontiguousarray(inputs[p.dtype][row]) for p, row in _rows(op))
    njit(scope["run"])(*arguments, out)
    return out.view(np.uint32).reshape(1, THREADS)


def in_domain(op: Op, inputs: Arrays) -> np.ndarray:
    """The threads whose operands the op says something about."""
    domain = DOMAINS.get(op.name)
    if domain is None:
        return np.ones(THREADS, bool)
    return np.asarray(domain(*(inputs[p.dtype][row] for p, row in _rows(op))), bool)
