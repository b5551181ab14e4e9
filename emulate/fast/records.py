"""Byte offsets of the records that compiled code and the host share.

A *fiber* is a CUDA thread: a stack of `STACK_BYTES`, aligned to its size, with the fiber's record
at its low end. So a thread finds its record by masking its frame address: compiled code holds no
absolute address, which is what makes it cacheable. Every field is a 64-bit word.
"""

STACK_BITS = 16
STACK_BYTES = 1 << STACK_BITS

WARP_LANES = 32
WARPGROUP_LANES = 128

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
FIBER_WARPGROUP = 96
FIBER_OPERANDS = 104  # of the op that it waits in, for a deadlock's message
OPERAND_WORDS = 6
FIBER_QUEUES = 152  # one record for each group of the thread's own async copies

# Queue: async copies of one thread that complete in order, by groups that it commits.
QUEUE_ISSUED = 0
QUEUE_DONE = 8
QUEUE_GROUPS = 16  # committed groups
QUEUE_SIZE = 24  # records in the ring; a power of two
QUEUE_ENDS = 32  # ring: QUEUE_ISSUED at each commit
GROUP_RING = 16
QUEUE_COPIES = QUEUE_ENDS + 8 * GROUP_RING  # ring of copy records
COPY_BYTES = 128  # run address, then operand words
QUEUE_CP = FIBER_QUEUES
CP_RING = 64
QUEUE_BULK = QUEUE_CP + QUEUE_COPIES + COPY_BYTES * CP_RING
BULK_RING = 16
FIBER_CANARY = QUEUE_BULK + QUEUE_COPIES + COPY_BYTES * BULK_RING
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
RUN_COPIES = 152  # COPIES_*: when async work completes
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
RUN_BUDGET = 248  # switches until the hub returns to the host
RUN_COPY_SEED = 256  # generator for the time of async copies
RUN_FLIGHTS = 264  # ring of copies in flight that an mbarrier counts
RUN_FLIGHT_HEAD = 272
RUN_FLIGHT_COUNT = 280
RUN_GRID_ARRIVED = 288
RUN_GRID_WAITERS = 296
RUN_EVENTS = 304  # since the last switch
RUN_BYTES = 312

COPIES_EAGER = 0  # at the call
COPIES_LAZY = 1  # as late as the program allows
COPIES_RANDOM = 2

# Flight: a copy record, and who issued it.
FLIGHT_FIBER = COPY_BYTES
FLIGHT_LINE = COPY_BYTES + 8
FLIGHT_BYTES = COPY_BYTES + 16
FLIGHT_RING = 1024  # a power of two

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
BLOCK_WARPGROUPS = 112
BLOCK_NAMED = 120  # named barriers: threads that arrived, expected threads, waiters
NAMED_ARRIVED = 0
NAMED_COUNT = 8
NAMED_WAITERS = 16
NAMED_BYTES = 24
NAMED_BARRIERS = 16
BLOCK_BYTES = BLOCK_NAMED + NAMED_BYTES * NAMED_BARRIERS

# Unit: a warp or a warpgroup.
UNIT_ARRIVED = 0
UNIT_OP = 8
UNIT_WAITERS = 16
UNIT_GENERATION = 24
UNIT_EXCHANGE = 32  # operands and results of the collective, two halves
UNIT_HALF = 40  # bytes of a half
UNIT_SIZE = 48  # lanes that the block has
UNIT_LANES = 56  # lanes of a whole unit
UNIT_GROUPS = 64  # committed groups of async products
UNIT_ENDS = 72  # ring: the queue's UNIT_ISSUED at each commit
# Async products of the unit, which complete in order.
UNIT_ISSUED = UNIT_ENDS + 8 * GROUP_RING
UNIT_DONE = UNIT_ISSUED + 8
UNIT_PRODUCTS = UNIT_DONE + 8  # address of the ring of product records
UNIT_PRODUCT_BYTES = UNIT_PRODUCTS + 8
UNIT_STAGE = UNIT_PRODUCT_BYTES + 8  # address of the exchange that a completing product uses
UNIT_BYTES = UNIT_STAGE + 8

# Product: an async op of a unit. After the header the addresses of its lanes' tiles, then operands.
PRODUCT_RUN = 0
PRODUCT_OPERAND_BYTES = 8
PRODUCT_TILES = 16  # how many
PRODUCT_FIBER = 24
PRODUCT_LINE = 32
PRODUCT_TILE = 40  # each: offset in the exchange, bytes of a lane
MAX_TILES = 4
PRODUCT_HEADER = PRODUCT_TILE + 16 * MAX_TILES
PRODUCT_RING = 16

# What a fiber waits in, besides the numbers of ops.
WAIT_BARRIER = -1
WAIT_RETRY = -2
WAIT_GRID = -3

ERROR_RAISED = 1
ERROR_DIVERGENT = 2
ERROR_EXITED = 3
ERROR_PARTIAL_UNIT = 4
ERROR_STACK = 5
ERROR_NAMED_ID = 6
ERROR_NAMED_COUNT = 7
ERROR_NAMED_OTHER = 8
ERROR_MASK = 9
ERROR_GRID = 10

HUB_DONE = 0
HUB_DEADLOCK = 1
HUB_ERROR = 2
HUB_PAUSED = 3
