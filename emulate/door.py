"""Numba's own door: kernels of Numba's simulator run here.

With ``NUMBA_ENABLE_CUDASIM=1``, after `install`, ``cuda.jit(kernel)[grid, block, stream,
shared](*args)`` runs on an engine of this package, with the simulator's arrays and streams. So do
device ops, ``alignment=`` and the launch options that the stock simulator rejects. ``import
emulate.door`` installs the engine that ``$EMULATE_DOOR`` names, if it names one.

``threads`` keeps the simulator's own threads, one OS thread a CUDA thread, and gives them what they
lack; CTAs then run one after the other, so that none may wait for a later one.
"""

import os
from collections.abc import Callable
from typing import Any, Literal

from emulate.errors import EmulationError

Engine = Literal["fast", "interpreted", "checked", "threads"]
ENGINES = ("fast", "interpreted", "checked", "threads")
VARIABLE = "EMULATE_DOOR"


class NoSimulator(EmulationError):
    """Numba's simulator is not switched on in this process."""


_originals: list[Callable[[], None]] = []


def install(engine: Engine = "fast", **options: Any) -> None:
    """Send the launches of Numba's simulator to an engine, from now on.

    Args:
        engine: ``fast``, ``interpreted``, ``checked`` (`emulate.check`: a finding raises
            `emulate.FindingError`) or ``threads``.
        **options: of `emulate.launch` or `emulate.check`; ``threads`` takes none.

    Raises:
        ValueError: no such engine.
        NoSimulator: ``NUMBA_ENABLE_CUDASIM`` was not set when Numba was imported.
    """
    from numba import config, cuda

    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "threads" and options:
        raise ValueError(f"engine: threads takes no options, got {', '.join(options)}")
    if not config.ENABLE_CUDASIM:
        raise NoSimulator("door: set NUMBA_ENABLE_CUDASIM=1 before Numba is imported")
    from numba.cuda.simulator import api, kernel

    uninstall()
    stock = kernel.FakeCUDAKernel.__call__

    def launch(self: Any, *args: Any) -> Any:
        if self._device or kernel._get_kernel_context():
            return stock(self, *args)
        return _launch(self, args, engine, options)

    _replace(kernel.FakeCUDAKernel, "__call__", launch)
    _replace(api, "jit", _make_jit(kernel.FakeCUDAKernel))
    _replace(cuda, "jit", api.jit)


def uninstall() -> None:
    """Give the simulator back what `install` replaced."""
    while _originals:
        _originals.pop()()


def _replace(owner: Any, name: str, value: Any) -> None:
    original = getattr(owner, name)
    _originals.append(lambda: setattr(owner, name, original))
    setattr(owner, name, value)


def _make_jit(kernel_class: Any) -> Callable[..., Any]:
    def jit(
        func_or_sig: Any = None,
        device: bool = False,
        debug: Any = None,
        fastmath: bool = False,
        extensions: Any = (),
        **options: Any,
    ) -> Any:
        """`numba.cuda.jit`; options that only tell a compiler what to do are accepted."""
        if options.get("link"):
            raise NotImplementedError("door: code that is linked in cannot run on the CPU")

        def wrap(function: Any) -> Any:
            return kernel_class(
                function,
                device=device,
                fastmath=fastmath,
                extensions=extensions,
                debug=bool(debug),
            )

        is_function = callable(func_or_sig) and hasattr(func_or_sig, "__code__")
        return wrap(func_or_sig) if is_function else wrap

    return jit


def _launch(kernel: Any, args: tuple[Any, ...], engine: str, options: dict[str, Any]) -> None:
    from numba.cuda.errors import normalize_kernel_dimensions

    import emulate

    grid, block = normalize_kernel_dimensions(kernel.grid_dim, kernel.block_dim)
    copied_back: list[Callable[[], None]] = []
    values = [_argument(kernel, arg, copied_back) for arg in args]
    launch = (kernel.fn, grid, block, *values)
    shared_bytes = kernel.dynshared_size
    if engine == "threads":
        _launch_threads(*launch, shared_bytes=shared_bytes)
    elif engine == "checked":
        emulate.check(*launch, shared_bytes=shared_bytes, raise_on_finding=True, **options)
    else:
        emulate.launch(*launch, shared_bytes=shared_bytes, engine=engine, **options)  # type: ignore[arg-type]
    for copy_back in copied_back:
        copy_back()


def _launch_threads(function: Any, grid: Any, block: Any, *values: Any, shared_bytes: int) -> None:
    from emulate.door_threads import launch
    from emulate.front import arguments
    from emulate.options import check_shape

    shape = check_shape(grid, block, shared_bytes)
    launch(function, shape, arguments(values))


def _argument(kernel: Any, value: Any, copied_back: list[Callable[[], None]]) -> Any:
    """What the stock simulator would hand to the kernel: extensions and `cuda.In` are followed."""
    from numba.cuda.simulator.args import ArgHint

    for extension in kernel.extensions:
        _, value = extension.prepare_args(None, value, stream=0, retr=copied_back)
    return value.to_device(copied_back) if isinstance(value, ArgHint) else value


_chosen = os.environ.get(VARIABLE)
if _chosen:
    install(_chosen)  # type: ignore[arg-type]
