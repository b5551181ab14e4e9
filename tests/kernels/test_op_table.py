"""The op table: its grammar, its PTX, and that effects say exactly what twins touch."""

import itertools

import numpy as np
import pytest
from numba import config

from nbmoe_kernels.device import atomics, memory, sync, warp, wgmma
from nbmoe_kernels.device.effects import (
    Access,
    Fence,
    GridWait,
    MbarArrive,
    NamedBarrier,
    ProxyFence,
    reads,
    writes,
)
from nbmoe_kernels.device.op import (
    NUMPY_TYPES,
    STUBS,
    TABLE,
    Param,
    Scope,
    Timing,
    device_op,
    parse_params,
)
from nbmoe_kernels.kernel import kernel
from tests.kernels.all_ops import all_ops
from tests.kernels.assemble import assemble
from tests.kernels.example_operands import example, named_bytes

OPS = all_ops()


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


def test_factory_gives_one_op_for_equal_arguments():
    assert atomics.atomic("add") is atomics.atomic("add", "u32", order="relaxed", scope="gpu")
    assert wgmma.wgmma(8, "f16") is wgmma.wgmma(n=8, dtype="f16", a_in_registers=False)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (atomics.atomic, ("nand",)),
        (atomics.atomic, ("xor", "f32")),
        (atomics.compare_and_swap, ("i32",)),
        (atomics.wait_ge, ("f32",)),
        (wgmma.wgmma, (12, "e4m3")),
        (wgmma.wgmma, (264, "f16")),
        (warp.reduce_lanes, ("xor", "i32")),
        (sync.set_max_registers, (41,)),
    ],
)
def test_factories_refuse_what_no_instruction_does(make, arguments):
    options = {"increase": True} if make is sync.set_max_registers else {}
    with pytest.raises(ValueError, match=str(arguments[0])):
        make(*arguments, **options)
    with pytest.raises(ValueError, match=r"dtype.*e5m2"):
        wgmma.wgmma(8, "e5m2")
    with pytest.raises(ValueError, match="reduction: operation"):
        atomics.reduction("exch")


@pytest.mark.parametrize("make", [atomics.load, atomics.store, atomics.reduction])
def test_order_must_fit_the_access(make):
    arguments = ("add",) if make is atomics.reduction else ()
    with pytest.raises(ValueError, match="order: expected one of"):
        make(*arguments, order="acq_rel")


def call_lines(op, name):
    """Source lines that call op ``name`` once: operands are read, results are stored."""
    if op.group == "wgmma.commit":
        return []  # it is called after every product, and alone the assembler warns
    arguments, lines, stored = [], [], []
    for p in op.params:
        dtype = f"np.{NUMPY_TYPES[p.dtype].__name__}"
        if p.kind == "scalar":
            lines.append(f"{name}_{p.name} = {dtype}(data[lane])")
            arguments.append(f"{name}_{p.name}")
        elif p.kind == "tile":
            tile = f"{name}_tile"
            lines += [
                f"{tile} = cuda.local.array({p.length}, {dtype})",
                f"for i in range({p.length}):",
                # Copies of one value would be made after the fence, where the assembler complains.
                f"    {tile}[i] = {dtype}(data[lane + np.uint64(i)])",
            ]
            arguments.append(tile)
            stored += [f"{tile}[0]", f"{tile}[{p.length - 1}]"]
        elif p.kind == "shared":
            arguments += [f"shared_{p.dtype}", "np.uint32(0)"]
        else:
            arguments += [f"global_{p.dtype}", "lane"]
    call = f"{name}({', '.join(arguments)})"
    is_product = op.group == "wgmma"
    lines += ["fence()"] * is_product
    if op.result:
        names = [f"{name}_r{i}" for i in range(max(op.result[1], 1))]
        lines.append(f"{', '.join(names)} = {call}")
        stored += names
    else:
        lines.append(call)
    lines += ["commit()", "wait()"] * is_product
    return lines + [f"out[lane] = np.float64({value})" for value in stored]


def call_kernel(ops):
    """A kernel that calls each op once."""
    from numba import cuda

    dtypes = {(p.kind, p.dtype) for op in ops for p in op.params if p.is_pointer}
    global_types = sorted(dtype for kind, dtype in dtypes if kind == "global")
    extra = "".join(f", global_{d}" for d in global_types)
    lines = [f"def calls_ops(data, out{extra}):", "lane = np.uint64(cuda.threadIdx.x)"]
    for kind, dtype in sorted(dtypes):
        if kind == "shared":
            numpy_type = f"np.{NUMPY_TYPES[dtype].__name__}"
            lines.append(f"shared_{dtype} = cuda.shared.array(64, {numpy_type}, alignment=1024)")
    for op in ops:
        lines += call_lines(op, op.name)
    namespace = {"np": np, "cuda": cuda, "__name__": __name__}
    namespace |= {op.name: STUBS[op.name] for op in ops}
    namespace |= {"fence": wgmma.wgmma_fence, "commit": wgmma.wgmma_commit}
    namespace["wait"] = wgmma.wgmma_wait(0)
    exec("\n    ".join(lines), namespace)
    params = ["global u32* data", "global f64* out"]
    params += [f"global {d}* global_{d}" for d in global_types]
    # The registers that `setmaxnreg` asks for must be there: one block of 128 threads.
    made = kernel(", ".join(params), threads=128, name=f"calls_{ops[0].name}")
    return made(namespace["calls_ops"])


def batches():
    """Ops of one module and first architecture together: a compilation takes half a second."""

    def key(op):
        return op.twin.__module__, op.min_cc

    for _, group in itertools.groupby(sorted(OPS.values(), key=key), key):
        ops = list(group)
        # The assembler would mix the registers of one product with another's wait.
        size = 1 if ops[0].twin.__module__ == wgmma.__name__ else 16
        for i in range(0, len(ops), size):
            yield pytest.param(ops[i : i + size], id=ops[i].name)


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
@pytest.mark.parametrize("ops", list(batches()))
def test_ops_assemble_for_their_first_architecture(ops, tmp_path):
    assert assemble(call_kernel(ops), ops[0].min_cc, tmp_path).faults() == []


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
def test_assembler_refuses_a_wrong_instruction(restored_table, tmp_path):
    def nonsense():
        pass

    device_op("void()", ptx="fence.acq_rel.galaxy;", effects=(), name="nonsense")(nonsense)
    with pytest.raises(AssertionError, match=r"galaxy|Parsing error"):
        assemble(call_kernel([TABLE["nonsense"]]), (9, 0), tmp_path)


ORDERING = Fence | ProxyFence | NamedBarrier | GridWait


@pytest.mark.parametrize("name", OPS)
def test_effects_name_parameters(name):
    op = OPS[name]
    pointers = {p.name for p in op.params if p.is_pointer}
    scalars = {p.name for p in op.params if p.kind == "scalar"}
    for effect in op.effects or ():
        assert isinstance(effect, ORDERING) or effect.param in pointers
        for number in ("nbytes", "count", "expect", "parity", "barrier"):
            value = getattr(effect, number, 0)
            assert isinstance(value, int) or value in scalars
    if pointers:
        assert op.effects is not None
    if op.timing is Timing.ASYNC:
        # Something must be able to complete it.
        counted = any(type(e).__name__ == "MbarComplete" for e in op.effects)
        assert (op.group in ("cp", "bulk", "wgmma")) != counted


# A call of the largest products takes too long to be made once a byte.
LARGEST = ("256k", "n64k64", "n64k128")
FOOTPRINTS = [n for n, op in OPS.items() if op.params and not any(k in n for k in LARGEST)]


@pytest.mark.parametrize("name", FOOTPRINTS)
def test_twin_touches_exactly_what_effects_say(name):
    op = OPS[name]
    if any(p.is_pointer for p in op.params):
        assert_writes(op)
        assert_reads(op)
    else:
        assert all(isinstance(effect, ORDERING) for effect in op.effects or ())


def assert_writes(op):
    """Whatever the arrays hold, the bytes that change are those that the effects name."""
    touched = {}
    for fill in (0, 1, 2, 0x55):
        made = example(op, fill)
        named = named_bytes(made, write=True)
        before = {n: made.bytes_of(n).copy() for n in named}
        made.run()
        for n, old in before.items():
            changed = np.flatnonzero(old != made.bytes_of(n))
            touched.setdefault(n, set()).update(changed.tolist())
    for n, bytes_named in named.items():
        assert touched[n] <= bytes_named
        # High bytes of small numbers stay 0: whole elements are compared.
        itemsize = 1 if n == "matrix" else made.arrays[n].itemsize
        assert {b // itemsize for b in touched[n]} == {b // itemsize for b in bytes_named}


def is_result_of_reads(op):
    """Whether what is read shows in a result, a tile or another array."""
    has_output = bool(op.result) or any(p.kind == "tile" for p in op.params)
    copies = any(isinstance(e, Access) and e.write for e in op.effects)
    return has_output or copies


def assert_reads(op):
    """Perturb every byte: the ones that the effects name matter, the others do not."""
    named = named_bytes(example(op, 5), write=False)
    # A map holds the matrix's address, which is another one in each example.
    compared = [n for n in named if n != "tensor_map"]

    def run(perturbed=None, byte=0):
        made = example(op, 5)
        if perturbed is not None:
            made.bytes_of(perturbed)[byte] ^= 0xFF
        outcome = made.run()
        others = [made.bytes_of(n).tobytes() for n in compared if n != perturbed]
        return repr(outcome), others

    plain, plain_others = run()
    for n, bytes_named in named.items():
        # A broken map is refused, not followed; barriers are words of the twins' own.
        if n in ("tensor_map", "bar"):
            continue
        matter = set()
        size = example(op, 5).bytes_of(n).size
        others = [o for o, other in zip(plain_others, compared, strict=True) if other != n]
        for byte in range(size):
            outcome = run(n, byte)
            if outcome != (plain, others):
                matter.add(byte)
        assert matter <= bytes_named
        if is_result_of_reads(op):
            assert matter == bytes_named


@pytest.mark.parametrize(
    ("effect", "check"), [(reads("src", 4), assert_reads), (writes("src", 4), assert_writes)]
)
def test_footprint_check_finds_a_wrong_effect(restored_table, effect, check):
    @device_op("u32(global u32* src)", ptx="", effects=(effect,), name="touches_too_much")
    def touches_too_much(src, src_index):
        total = src[src_index] + src[src_index + np.uint64(1)]
        if effect.write:
            src[src_index] = src[src_index + np.uint64(1)] = np.uint32(9)
        return total

    with pytest.raises(AssertionError):
        check(TABLE["touches_too_much"])


def test_effects_of_a_few_ops_by_hand():
    assert OPS["mbarrier_arrive_expect"].effects == (MbarArrive("bar", 1, "nbytes"),)
    assert OPS["named_barrier_arrive"].effects == (NamedBarrier("barrier", "count", waits=False),)
    assert OPS["wgmma_m64n256k16_f16_shared"].scope is Scope.WARPGROUP
    first = {"a_index": np.full(128, 1024 + 32)}
    footprint = OPS["wgmma_m64n256k16_f16_shared"].effects[0].footprint(first)
    # Row 1, bytes 32 to 63: pieces 2 and 3 are at 3 and 2.
    assert list(footprint[32:64]) == [1024 + 128 + i for i in (*range(48, 64), *range(32, 48))]
    assert len(footprint) == 64 * 32


def test_async_copy_zero_fills():
    copy = memory.cp_async(16).op.twin
    dst = np.full(8, 0xFFFFFFFF, np.uint32)
    src = np.arange(64, dtype=np.uint8)
    copy(dst, 2, src, 8, 5)
    np.testing.assert_array_equal(dst[2:6].view(np.uint8), [8, 9, 10, 11, 12] + [0] * 11)
    np.testing.assert_array_equal(dst[[0, 1, 6, 7]], 0xFFFFFFFF)
