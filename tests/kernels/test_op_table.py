"""The op table: its grammar, its PTX, and that effects say exactly what twins touch."""

import numpy as np
import pytest
from numba import config

import nbmoe_kernels.catalog  # noqa: F401  declares every op that a kernel uses
from nbmoe_kernels.device import memory
from nbmoe_kernels.device.effects import reads
from nbmoe_kernels.device.op import (
    NUMPY_TYPES,
    STUBS,
    TABLE,
    Param,
    Scope,
    device_op,
    parse_params,
)
from nbmoe_kernels.kernel import kernel
from tests.kernels.assemble import assemble

# Other tests declare ops of their own in the same process.
OPS = sorted(n for n, op in TABLE.items() if op.twin.__module__.startswith("nbmoe_kernels."))


@pytest.fixture
def restored_table():
    """Ops that a test declares are forgotten afterwards."""
    names = set(TABLE)
    yield
    for name in set(TABLE) - names:
        del TABLE[name], STUBS[name]


def test_parameters_follow_the_grammar():
    params = parse_params("shared u8* row, u32! mask, f32[4] acc, global u16* out, i64 n")
    assert params == (
        Param("row", "shared", "u8"),
        Param("mask", "scalar", "u32", uniform=True),
        Param("acc", "tile", "f32", length=4),
        Param("out", "global", "u16"),
        Param("n", "scalar", "i64"),
    )


@pytest.mark.parametrize("text", ["u33 x", "u32", "shared u8 x", "u8* x", "u32 x y", "f32[] a"])
def test_wrong_parameters_are_refused(text):
    with pytest.raises(ValueError, match="signature grammar"):
        parse_params(text)


def test_wrong_signature_is_refused():
    with pytest.raises(ValueError, match="signature grammar"):
        device_op("u32 u32 x", ptx="")


def test_op_is_declared_once(restored_table):
    def nothing():
        pass

    device_op("void()", ptx="", effects=(), name="only_once")(nothing)
    with pytest.raises(ValueError, match="'only_once' is declared twice"):
        device_op("void()", ptx="", effects=(), name="only_once")(nothing)


def test_pure_op_runs_alone_and_others_need_a_kernel():
    assert STUBS["add_rn"](np.float32(1), np.float32(2)) == 3
    with pytest.raises(RuntimeError, match="sync_warp needs a running kernel"):
        STUBS["sync_warp"]()


def call_kernel(op):
    """A kernel that calls an op once, on operands that it reads and results that it stores."""
    stub = STUBS[op.name]
    lines = ["def calls_op(data, out):", "    lane = np.uint64(cuda.threadIdx.x)"]
    arguments = []
    for p in op.params:
        dtype = f"np.{NUMPY_TYPES[p.dtype].__name__}"
        if p.kind == "scalar":
            arguments.append(f"{dtype}(data[lane])")
        elif p.kind == "tile":
            lines.append(f"    {p.name} = cuda.local.array({p.length}, {dtype})")
            lines.append(f"    for i in range({p.length}):")
            lines.append(f"        {p.name}[i] = {dtype}(data[lane])")
            arguments.append(p.name)
        elif p.kind == "shared":
            lines.append(f"    {p.name} = cuda.shared.array(64, {dtype}, alignment=16)")
            arguments += [p.name, "np.uint32(0)"]
        else:
            arguments += [f"global_{p.dtype}", "lane"]
    call = f"stub({', '.join(arguments)})"
    tile = next((p for p in op.params if p.kind == "tile"), None)
    if op.result and op.result[1]:
        names = [f"r{i}" for i in range(op.result[1])]
        lines.append(f"    {', '.join(names)} = {call}")
        lines += [f"    out[lane + np.uint64({i})] = np.float64({n})" for i, n in enumerate(names)]
    elif op.result:
        lines.append(f"    out[lane] = np.float64({call})")
    else:
        lines.append(f"    {call}")
    if tile:
        lines.append(f"    out[lane] = np.float64({tile.name}[0])")
    globals_used = sorted({p.dtype for p in op.params if p.kind == "global"})
    extra = "".join(f", global_{d}" for d in globals_used)
    lines[0] = f"def calls_op(data, out{extra}):"
    from numba import cuda

    namespace = {"np": np, "cuda": cuda, "stub": stub, "__name__": __name__}
    exec("\n".join(lines), namespace)
    params = "global u32* data, global f64* out" + "".join(
        f", global {d}* global_{d}" for d in globals_used
    )
    return kernel(params, threads=32, name=f"calls_{op.name}")(namespace["calls_op"])


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
@pytest.mark.parametrize("name", OPS)
def test_op_assembles_for_its_first_architecture(name, tmp_path):
    op = TABLE[name]
    assert assemble(call_kernel(op), op.min_cc, tmp_path).faults() == []


@pytest.mark.parametrize("name", OPS)
def test_twin_touches_exactly_what_effects_say(name):
    op = TABLE[name]
    pointers = [p for p in op.params if p.is_pointer]
    if not pointers:
        assert not op.effects
        return
    assert op.scope is Scope.THREAD
    assert {a.param for a in op.effects} == {p.name for p in pointers}
    for access in op.effects:
        assert_footprint(op, access)


def assert_footprint(op, access):
    """Perturb every byte around an access: the ones it names matter, the others do not."""
    index, size = 16, 64
    param = next(p for p in op.params if p.name == access.param)
    itemsize = np.dtype(NUMPY_TYPES[param.dtype]).itemsize
    numbers = {p.name: 3 for p in op.params if p.kind == "scalar"}
    nbytes = numbers[access.nbytes] if isinstance(access.nbytes, str) else access.nbytes
    expected = set(range(index * itemsize, index * itemsize + nbytes))

    def run(fill, changed=None):
        arrays = {
            p.name: np.full(size, fill, NUMPY_TYPES[p.dtype]) for p in op.params if p.is_pointer
        }
        if changed is not None:
            arrays[access.param].view(np.uint8)[changed] ^= 0xFF
        before = arrays[access.param].copy()
        args = []
        for p in op.params:
            scalar = NUMPY_TYPES[p.dtype](numbers.get(p.name, 0))
            args += [arrays[p.name], np.uint64(index)] if p.is_pointer else [scalar]
        result = op.twin(*args)
        others = [arrays[n].tobytes() for n in arrays if n != access.param]
        return before, arrays[access.param], (result, others)

    if access.write:
        touched = set()
        for fill in (0, 1):
            before, after, _ = run(fill)
            touched |= set(np.flatnonzero(before.view(np.uint8) != after.view(np.uint8)))
        # The copied zeros and the stored 3s differ from one fill or the other in every byte
        # except the high bytes of small numbers, which are 0 under both fills.
        assert touched <= expected
        assert {b // itemsize for b in touched} == {b // itemsize for b in expected}
    else:
        _, _, plain = run(5)
        matter = {byte for byte in range(size * itemsize) if repr(run(5, byte)[2]) != repr(plain)}
        assert matter == expected


def test_footprint_check_finds_a_wrong_effect(restored_table):
    @device_op("u32(global u32* src)", ptx="", effects=(reads("src", 4),), name="reads_too_much")
    def reads_too_much(src, src_index):
        return src[src_index] + src[src_index + 1]

    with pytest.raises(AssertionError):
        assert_footprint(TABLE["reads_too_much"], TABLE["reads_too_much"].effects[0])


def test_async_copy_zero_fills():
    copy = memory.cp_async(16).op.twin
    dst = np.full(8, 0xFFFFFFFF, np.uint32)
    src = np.arange(64, dtype=np.uint8)
    copy(dst, 2, src, 8, 5)
    np.testing.assert_array_equal(dst[2:6].view(np.uint8), [8, 9, 10, 11, 12] + [0] * 11)
    np.testing.assert_array_equal(dst[[0, 1, 6, 7]], 0xFFFFFFFF)
