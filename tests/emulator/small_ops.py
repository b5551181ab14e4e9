"""Device ops declared by the tests: one of every kind that the engines know."""

import numpy as np

from nbmoe_kernels.device.effects import reads, writes
from nbmoe_kernels.device.op import Scope, Timing, device_function, device_op


@device_op("u32(u32 x, u32 n)", ptx="shf.l.wrap.b32 <ret>, <x>, <x>, <n>;", name="t_rotate")
def rotate(x, n):
    """x rotated left by n % 32."""
    by = np.uint32(n & np.uint32(31))
    return np.uint32(
        np.uint32(x << by) | np.uint32(x >> np.uint32((np.uint32(32) - by) & np.uint32(31)))
    )


@device_op("f32(f32 x)", ptx="neg.f32 <ret>, <x>;", name="t_negate")
def negate(x):
    return np.uint32(np.float32(x).view(np.uint32) ^ np.uint32(0x80000000)).view(np.float32)


@device_op(
    "u32[2](global u32* src)",
    ptx="ld.global.v2.u32 <ret>, [<src>];",
    effects=(reads("src", 8),),
    name="t_load_pair",
)
def load_pair(src, src_index):
    return src[src_index], src[src_index + 1]


@device_op(
    "void(global u32* dst, u32 a, u32 b)",
    ptx="st.global.v2.u32 [<dst>], {<a>, <b>};",
    effects=(writes("dst", 8),),
    name="t_store_pair",
)
def store_pair(dst, dst_index, a, b):
    dst[dst_index] = a
    dst[dst_index + 1] = b


@device_op(
    "u32(u32 value, u32! delta)",
    scope=Scope.WARP,
    ptx="shfl.sync.down.b32 <ret>, <value>, <delta>, 0x1f, 0xffffffff;",
    effects=(),
    name="t_shuffle_down",
)
def shuffle_down(value, delta):
    result = np.empty(32, np.uint32)
    for lane in range(32):
        source = lane + np.int64(delta)
        result[lane] = value[source] if source < 32 else value[lane]
    return result


@device_op(
    "u32(u32 predicate)",
    scope=Scope.WARP,
    ptx="{ .reg .pred p; setp.ne.u32 p, <predicate>, 0; "
    "vote.sync.ballot.b32 <ret>, p, 0xffffffff; }",
    effects=(),
    name="t_ballot",
)
def ballot(predicate):
    mask = np.uint32(0)
    for lane in range(32):
        if predicate[lane] != np.uint32(0):
            mask = np.uint32(mask | np.uint32(np.uint32(1) << np.uint32(lane)))
    result = np.empty(32, np.uint32)
    result[:] = mask
    return result


@device_op(
    "void(i32[2] acc, u32 a, u32 b)",
    scope=Scope.WARP,
    ptx="mma.sync.aligned.m8n8k16.row.col.s32.u8.u8.s32 <acc>, {<a>}, {<b>}, <acc>;",
    effects=(),
    name="t_mma_u8",
)
def mma_u8(acc, a, b):
    """acc (8 x 8) += a (8 x 16 bytes) @ b (16 x 8 bytes), exact."""
    for lane in range(32):
        for j in range(2):
            row, column = lane // 4, 2 * (lane % 4) + j
            total = np.int32(acc[lane, j])
            for k in range(16):
                shift = np.uint32(8 * (k % 4))
                x = np.int32((a[4 * row + k // 4] >> shift) & np.uint32(255))
                y = np.int32((b[4 * column + k // 4] >> shift) & np.uint32(255))
                total = np.int32(total + np.int32(x * y))
            acc[lane, j] = total


@device_op(
    "u32(shared u32* row)",
    scope=Scope.WARP,
    ptx="ldmatrix.sync.aligned.m8n8.x1.shared.b16 <ret>, [<row>];",
    effects=(reads("row", 16),),
    name="t_ldmatrix",
)
def ldmatrix(row, row_index):
    """Lanes 0 to 7 name rows of 4 words; lane l gets word l % 4 of row l // 4."""
    result = np.empty(32, np.uint32)
    for lane in range(32):
        result[lane] = row[row_index[lane // 4] + lane % 4]
    return result


@device_op(
    "u32[2](shared u32* row)",
    scope=Scope.WARP,
    ptx="ldmatrix.sync.aligned.m8n8.x2.shared.b16 <ret>, [<row>];",
    effects=(reads("row", 16),),
    name="t_ldmatrix_x2",
)
def ldmatrix_x2(row, row_index):
    """Two matrices; lanes 8 to 15 name the second one's rows."""
    result = np.empty((32, 2), np.uint32)
    for lane in range(32):
        for matrix in range(2):
            result[lane, matrix] = row[row_index[8 * matrix + lane // 4] + lane % 4]
    return result


@device_op(
    "void(shared u32* dst, global u32* src)",
    ptx="cp.async.ca.shared.global [<dst>], [<src>], 4;",
    timing=Timing.ASYNC,
    group="cp",
    effects=(reads("src", 4), writes("dst", 4)),
    name="t_copy",
)
def copy_word(dst, dst_index, src, src_index):
    dst[dst_index] = src[src_index]


@device_op("void()", ptx="cp.async.commit_group;", group="cp.commit", effects=(), name="t_commit")
def copy_commit():
    pass


@device_op("void()", ptx="cp.async.wait_group 0;", group="cp.wait0", effects=(), name="t_wait0")
def copy_wait_all():
    pass


@device_op("void()", ptx="cp.async.wait_group 1;", group="cp.wait1", effects=(), name="t_wait1")
def copy_wait_but_one():
    pass


@device_function
def mix(x):
    """A helper that calls an op."""
    return np.uint32(rotate(x, np.uint32(7)) ^ x)
