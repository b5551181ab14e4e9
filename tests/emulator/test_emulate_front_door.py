"""Arguments of `launch`: what no GPU takes is refused before anything runs."""

import numpy as np
import pytest
from numba import config, cuda, uint32

import emulate


def touch(x):
    x[0] = uint32(1)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 32, "grid"),
        (-1, 32, "grid"),
        ((1, 0), 32, "grid"),
        ((1, 65536), 32, "grid"),
        ((1, 1, 1, 1), 32, "grid"),
        (1.5, 32, "grid"),
        ("1", 32, "grid"),
        ((), 32, "grid"),
        (1, 0, "block"),
        (1, 1025, "block"),
        (1, (32, 64), "block: expected at most 1024 threads"),
        (1, (1, 1, 65), "block"),
    ],
)
def test_bad_shapes(launch, grid, block, message):
    x = np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match=message):
        launch(touch, grid, block, x)
    assert x[0] == 0


@pytest.mark.parametrize("shared_bytes", [-1, 227 * 1024 + 1, 300 * 1024, 1.5])
def test_bad_shared_memory(launch, shared_bytes):
    x = np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match="shared_bytes"):
        launch(touch, 1, 1, x, shared_bytes=shared_bytes)
    assert x[0] == 0


def big_static(x):
    buffer = cuda.shared.array(10000, uint32)
    buffer[0] = uint32(1)
    x[0] = buffer[0]


def test_static_and_dynamic_shared_memory_together(launch):
    x = np.zeros(1, np.uint32)
    launch(big_static, 1, 1, x, shared_bytes=1024)
    with pytest.raises(ValueError, match="shared memory"):
        launch(big_static, 1, 1, x, shared_bytes=192 * 1024)


def test_numpy_integers_are_extents(launch):
    x = np.zeros(1, np.uint32)
    launch(touch, np.int32(1), (np.uint64(1), 1), x, shared_bytes=np.int64(0))
    assert x[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "slow"}, "engine"),
        ({"copies": "late"}, "copies"),
        ({"resident": 0}, "resident"),
        ({"resident": "some"}, "resident"),
    ],
)
def test_bad_options(options, message):
    x = np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match=message):
        emulate.launch(touch, 1, 1, x, **options)
    assert x[0] == 0


def test_more_threads_at_one_time_than_there_is_room_for():
    with pytest.raises(ValueError, match="65536 threads at one time"):
        emulate.launch(touch, 65, 1024, np.zeros(1, np.uint32), resident="all")


@pytest.mark.parametrize("argument", [[1, 2], None, "x", object()])
def test_argument_of_no_known_type(launch, argument):
    with pytest.raises(TypeError, match="argument 0"):
        launch(touch, 1, 1, argument)


def test_array_without_a_numba_type():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="argument 0: Numba has no type for bfloat16"):
        emulate.launch(touch, 1, 1, np.zeros(1, ml_dtypes.bfloat16))


@pytest.mark.parametrize("kernel", [3, "touch", np.sin])
def test_kernel_that_is_no_function(launch, kernel):
    with pytest.raises(TypeError, match="kernel: expected a function"):
        launch(kernel, 1, 1, np.zeros(1, np.uint32))


class Wrapped:
    """A kernel object, as kernel libraries have them."""

    py_func = staticmethod(touch)


def test_object_with_a_python_function(launch):
    x = np.zeros(1, np.uint32)
    launch(Wrapped(), 1, 1, x)
    assert x[0] == 1


def test_report(engine):
    report = emulate.launch(touch, (3, 2), 32, np.zeros(1, np.uint32), engine=engine)
    assert report.engine == engine
    assert report.seconds > 0
    assert report.blocks == 6
    assert report.resident == 6
    again = emulate.launch(touch, (3, 2), 32, np.zeros(1, np.uint32), engine=engine)
    assert again.cached and again.compile_seconds == 0


# The simulator's module makes these names up when they are asked for: they cannot be imported.
if not config.ENABLE_CUDASIM:
    from numba.cuda import shared, syncthreads, threadIdx


def names_of_its_own(x):
    part = shared.array(32, np.uint32)
    part[threadIdx.x] = threadIdx.x
    syncthreads()
    x[threadIdx.x] = part[31 - threadIdx.x]


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator has no names to import")
def test_members_of_numba_cuda_imported_by_name():
    x = np.zeros(32, np.uint32)
    emulate.launch(names_of_its_own, 1, 32, x)
    assert x.tolist() == list(range(31, -1, -1))


def untypable(x):
    x[0] = cuda.no_such_function(1)


def test_what_the_engine_does_not_know_is_named(engine):
    error = {"fast": emulate.UnsupportedOp, "interpreted": emulate.EmulationError}[engine]
    with pytest.raises(error, match="no_such_function"):
        emulate.launch(untypable, 1, 1, np.zeros(1, np.uint32), engine=engine)
