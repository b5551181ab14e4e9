"""What a launch can raise besides `ValueError` and `TypeError` for bad arguments."""


class EmulationError(RuntimeError):
    """Base of every error that an emulated kernel causes."""


class ResourceError(EmulationError, ValueError):
    """The kernel's arrays need more memory than a CTA or a thread can have."""


class CompileError(EmulationError):
    """The fast engine cannot compile the kernel; the message is the compiler's."""


class UnsupportedOp(EmulationError):
    """The kernel uses an op, a function of `numba.cuda` or a case of one that the engine lacks."""


class KernelError(EmulationError):
    """The kernel, or the twin of an op that it called, raised: an index out of bounds, say."""


class Deadlock(EmulationError):
    """No thread can run and some have not finished; the message lists who waits where."""


class CollectiveDivergence(EmulationError):
    """Lanes of one warp met in different collectives."""


class EarlyExit(EmulationError):
    """A block barrier was used by a block of which some threads have exited."""


class StackOverflow(EmulationError):
    """A CUDA thread needed more stack than a fiber of the fast engine has."""


class UnsupportedPlatform(EmulationError):
    """The fast engine has no context switch for this machine."""
