"""What a launch refuses, with the line, and limits that depend on the architecture."""

import numpy as np
import pytest
from numba import cuda, uint8, uint32

import emulate
from emulate.options import SHARED_BYTES
from nbmoe_kernels.device.op import STUBS, TABLE, Timing, device_function, device_op


@device_function
def helper(x):
    return cuda.vote_everything(x)


def calls_helper(x):
    x[0] = helper(x[0])


def test_an_unknown_name_in_a_helper_has_its_line():
    line = helper.__code__.co_firstlineno + 2
    with pytest.raises(emulate.UnsupportedOp, match=f"cuda.vote_everything .*{__file__}:{line}"):
        emulate.launch(calls_helper, 1, 1, np.zeros(1, np.uint32))


def unknown_atomic(x):
    x[0] = 1
    cuda.atomic.multiply(x, 0, 3)


def test_an_unknown_name_in_a_namespace():
    line = unknown_atomic.__code__.co_firstlineno + 2
    with pytest.raises(emulate.UnsupportedOp, match=f"cuda.atomic.multiply .*:{line}"):
        emulate.launch(unknown_atomic, 1, 1, np.zeros(1, np.uint32))


@pytest.fixture
def declare():
    """Declares ops that are forgotten after the test."""
    names = []

    def make(name, **options):
        @device_op("u32(u32 x)", ptx="// never compiled", name=name, **options)
        def twin(x):
            if x == 0:
                raise NotImplementedError("t_unmodelled: this case has no model")
            return x

        names.append(name)
        return twin

    yield make
    for name in names:
        del TABLE[name], STUBS[name]


def make_kernel(op):
    def kernel(x):
        x[0] = op(x[0])

    return kernel


def test_an_op_of_an_unknown_group_has_its_line(declare):
    kernel = make_kernel(declare("t_strange", timing=Timing.ASYNC, group="strange", effects=()))
    line = kernel.__code__.co_firstlineno + 1
    with pytest.raises(emulate.UnsupportedOp, match=f"t_strange.*'strange', at {__file__}:{line}"):
        emulate.launch(kernel, 1, 1, np.zeros(1, np.uint32))


def test_a_twin_without_a_model_is_unsupported(declare):
    kernel = make_kernel(declare("t_unmodelled"))
    with pytest.raises(emulate.UnsupportedOp, match=r"this case has no model at .*, in block"):
        emulate.launch(kernel, 1, 1, np.zeros(1, np.uint32))


def test_an_op_of_a_later_architecture(declare):
    kernel = make_kernel(declare("t_later", min_cc=(10, 0)))
    with pytest.raises(emulate.UnsupportedOp, match=r"t_later needs compute capability 10.0"):
        emulate.launch(kernel, 1, 1, np.zeros(1, np.uint32))
    with pytest.raises(emulate.UnsupportedOp, match="no model"):
        emulate.launch(kernel, 1, 1, np.zeros(1, np.uint32), cc=(10, 0))


def shared(x):
    dynamic = cuda.shared.array(0, uint8)
    static = cuda.shared.array(1024, uint32)
    static[0] = uint32(dynamic.size)
    x[0] = static[0]


@pytest.mark.parametrize(("cc", "limit"), [((9, 0), 232448), ((8, 0), 166912), ((8, 9), 101376)])
def test_shared_memory_of_an_architecture(cc, limit):
    x = np.zeros(1, np.uint32)
    emulate.launch(shared, 1, 1, x, shared_bytes=limit - 4096, cc=cc)
    assert x[0] == limit - 4096
    with pytest.raises(emulate.ResourceError, match=f"at most {limit} bytes.*4096 static"):
        emulate.launch(shared, 1, 1, x, shared_bytes=limit - 4095, cc=cc)


def too_much_static(x):
    static = cuda.shared.array(12289, uint32)
    static[0] = uint32(1)
    x[0] = static[0]


def test_static_shared_memory_has_a_limit_of_its_own():
    with pytest.raises(emulate.ResourceError, match=r"static.* at most 49152 bytes, got 49156"):
        emulate.launch(too_much_static, 1, 1, np.zeros(1, np.uint32))


def test_every_limit_is_a_whole_number_of_kib():
    assert all(size % 1024 == 0 and size <= 227 * 1024 for size in SHARED_BYTES.values())


def test_an_unknown_architecture():
    with pytest.raises(ValueError, match=r"cc: expected one of .*\(9, 0\).*got \(3, 5\)"):
        emulate.launch(shared, 1, 1, np.zeros(1, np.uint32), cc=(3, 5))
