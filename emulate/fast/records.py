"""Byte offsets of the records that compiled code and the host share.

A *fiber* is a CUDA thread: a stack of `STACK_BYTES`, aligned to its size, with the fiber's record
at its low end. So a thread finds its record by masking its frame address: compiled code holds no
absolute address, which is what makes it cacheable. Every field is a 64-bit word.
"""

STACK_BITS = 16
STACK_BYTES = 1 << STACK_BITS

WARP_LANES = 32

# Fiber: one CUDA thread.
FIBER_SP = 0
FIBER_RUN = 8
FIBER_BLOCK = 16
FIBER_WARP = 24
FIBER_TID = 32  # x, y, z
FIBER_RANK = 56  # linear thread index in the block
FIBER_NEXT = 64  # link of the list that it waits in
FIBER_DONE = 72
FIBER_WAITS_IN = 80  # number of the op, see WAIT_*
FIBER_LINE = 88  # source line of that call
FIBER_COPIES_ISSUED = 96
FIBER_COPIES_DONE = 104
FIBER_GROUPS = 112  # committed groups
FIBER_GROUP_ENDS = 128  # ring: FIBER_COPIES_ISSUED at each commit
GROUP_RING = 16
FIBER_COPIES = FIBER_GROUP_ENDS + 8 * GROUP_RING  # ring of copy records
COPY_BYTES = 96  # run address, then operand words
COPY_RING = 128
FIBER_CANARY = FIBER_COPIES + COPY_BYTES * COPY_RING
CANARY = 0x5AFE57AC

# Run: one launch.
RUN_HUB_SP = 0
RUN_QUEUE = 8  # ring of runnable fibers
RUN_HEAD = 16
RUN_COUNT = 24
RUN_MASK = 32
RUN_LIVE = 40  # started, unfinished fibers
RUN_ARGUMENTS = 48
RUN_GRID = 56  # x, y, z
RUN_BLOCK = 80  # x, y, z
RUN_SEED = 104  # 0: first in, first out
RUN_ERROR = 112  # ERROR_*
RUN_ERROR_FIBER = 120
RUN_ERROR_DETAIL = 128
RUN_PARKED = 136  # list of fibers that asked to be retried later
RUN_PROGRESS = 144
RUN_LAZY = 152  # async copies land at the wait instead of at the call
RUN_THREADS = 160  # of a block
RUN_ENTRY = 168  # address of the kernel's entry
RUN_NEXT_BLOCK = 176
RUN_BLOCKS = 184
RUN_FREE = 192  # list of finished slots
RUN_SLOTS = 200  # slots that exist
RUN_USED = 208  # slots that were started
RUN_WINDOW = 216  # slots that are filled before anybody waits
RUN_SLOT = 224  # address of slot 0
RUN_SHARED_BYTES = 232  # of a CTA, static and dynamic
RUN_IDLE = 240  # rounds of retries in which nothing happened
RUN_BYTES = 248

# Block: a slot, in which one CTA after another lives.
BLOCK_INDEX = 0  # x, y, z
BLOCK_ALIVE = 24  # threads that have not exited
BLOCK_ARRIVED = 32
BLOCK_WAITERS = 40
BLOCK_SHARED = 48  # address of static shared memory
BLOCK_DYNAMIC = 56  # address of dynamic shared memory
BLOCK_DYNAMIC_BYTES = 64
BLOCK_NEXT = 72
BLOCK_STACKS = 80
BLOCK_WARPS = 88
BLOCK_VOTES = 96  # of the barrier that is filling
BLOCK_RESULT = 104  # of the last full barrier
BLOCK_BYTES = 112

# Warp.
WARP_ARRIVED = 0
WARP_OP = 8
WARP_WAITERS = 16
WARP_GENERATION = 24
WARP_EXCHANGE = 32  # operands and results of the collective, two halves
WARP_HALF = 40  # bytes of a half
WARP_SIZE = 48  # lanes
WARP_BYTES = 56

# What a fiber waits in, besides the numbers of ops.
WAIT_BARRIER = -1
WAIT_RETRY = -2

ERROR_RAISED = 1
ERROR_DIVERGENT = 2
ERROR_EXITED = 3
ERROR_PARTIAL_WARP = 4
ERROR_STACK = 5

HUB_DONE = 0
HUB_DEADLOCK = 1
HUB_ERROR = 2
