"""Programmatic dependent launch: a kernel that starts while the previous one still runs.

A kernel made with ``overlaps_previous=True`` may start as soon as every block of the previous
kernel of its stream has called `allow_next_grid` or ended. It must not touch what that kernel
writes, nor write what it reads, before `wait_for_previous_grid`. A kernel calls `allow_next_grid`
only after its own wait, so that a wait means everything launched before, not the previous kernel
alone. In a kernel that was not made so both ops do nothing, nor do they where launches run one
after another, as they do on every host executor. `emulate.check` finds what touches memory marked
with `emulate.unfinished` before the wait.
"""

from nbmoe_kernels.device.effects import GridWait
from nbmoe_kernels.device.op import device_op


@device_op("void()", ptx="griddepcontrol.wait;", effects=(GridWait(),), min_cc=(9, 0))
def wait_for_previous_grid():
    """Wait until the previous kernel of the stream has ended; its writes are then visible.

    Every thread that needs that calls it, or is ordered behind one that did by a barrier.
    """


@device_op("void()", ptx="griddepcontrol.launch_dependents;", effects=(), min_cc=(9, 0))
def allow_next_grid():
    """Let the next kernel of the stream start once every block has called this or ended.

    It says nothing about memory: the next kernel sees this one's writes past its own wait.
    """
