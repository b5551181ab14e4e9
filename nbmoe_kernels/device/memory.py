"""Vector loads and stores, and asynchronous copies from global to shared memory."""

import numpy as np

from nbmoe_kernels.device.effects import reads, writes
from nbmoe_kernels.device.op import Timing, device_op, op_factory


@device_op(
    "u32[2](global u32* src)",
    ptx="ld.global.v2.u32 <ret>, [<src>];",
    effects=(reads("src", 8, align=8),),
)
def load_v2(src, src_index):
    """Two consecutive words; the address must be a multiple of 8 bytes."""
    i = np.int64(src_index)
    return src[i], src[i + 1]


@device_op(
    "u32[4](global u32* src)",
    ptx="ld.global.v4.u32 <ret>, [<src>];",
    effects=(reads("src", 16, align=16),),
)
def load_v4(src, src_index):
    """Four consecutive words; the address must be a multiple of 16 bytes."""
    i = np.int64(src_index)
    return src[i], src[i + 1], src[i + 2], src[i + 3]


@device_op(
    "void(global u32* dst, u32 a, u32 b)",
    ptx="st.global.v2.u32 [<dst>], {<a>, <b>};",
    effects=(writes("dst", 8, align=8),),
)
def store_v2(dst, dst_index, a, b):
    """Store two consecutive words; the address must be a multiple of 8 bytes."""
    i = np.int64(dst_index)
    dst[i] = a
    dst[i + 1] = b


@device_op(
    "void(global u32* dst, u32 a, u32 b, u32 c, u32 d)",
    ptx="st.global.v4.u32 [<dst>], {<a>, <b>, <c>, <d>};",
    effects=(writes("dst", 16, align=16),),
)
def store_v4(dst, dst_index, a, b, c, d):
    """Store four consecutive words; the address must be a multiple of 16 bytes."""
    i = np.int64(dst_index)
    dst[i] = a
    dst[i + 1] = b
    dst[i + 2] = c
    dst[i + 3] = d


@device_op(
    "u32[2](shared u32* src)",
    ptx="ld.shared.v2.u32 <ret>, [<src>];",
    effects=(reads("src", 8, align=8),),
)
def load_shared_v2(src, src_index):
    """Two consecutive words of shared memory; the address must be a multiple of 8 bytes."""
    i = np.int64(src_index)
    return src[i], src[i + 1]


@device_op(
    "u32[4](shared u32* src)",
    ptx="ld.shared.v4.u32 <ret>, [<src>];",
    effects=(reads("src", 16, align=16),),
)
def load_shared_v4(src, src_index):
    """Four consecutive words of shared memory; the address must be a multiple of 16 bytes."""
    i = np.int64(src_index)
    return src[i], src[i + 1], src[i + 2], src[i + 3]


@device_op(
    "u32(shared u8* src)", ptx="ld.shared.u32 <ret>, [<src>];", effects=(reads("src", 4, align=4),)
)
def load_shared_word(src, src_index):
    """Four bytes as a little-endian word; the address must be a multiple of 4 bytes."""
    i = np.int64(src_index)
    word = np.uint32(0)
    for byte in range(4):
        word = np.uint32(word | np.uint32(np.uint32(src[i + byte]) << np.uint32(8 * byte)))
    return word


@op_factory
def load_shared_words(displacement: int):
    """The op ``(src, src_index)``: sixteen bytes as four little-endian words.

    They begin ``displacement`` bytes after the one that the arguments name, at a multiple of 16.
    Part of the address that is part of the instruction costs no arithmetic.
    """

    def offsets(operands):
        return int(operands["src_index"]) + displacement + np.arange(16)

    @device_op(
        "u32[4](shared u8* src)",
        ptx=f"ld.shared.v4.u32 <ret>, [<src>+{displacement}];",
        effects=(reads("src", footprint=offsets, align=16),),
        name=f"load_shared_words_{displacement}",
    )
    def load(src, src_index):
        i = np.int64(src_index) + displacement
        words = src[i : i + 16].view(np.uint32)
        return words[0], words[1], words[2], words[3]

    return load


@op_factory
def load_shared_pair(displacement: int):
    """The op ``(src, src_index)``: eight bytes as two words, placed as by `load_shared_words`."""

    def offsets(operands):
        return int(operands["src_index"]) + displacement + np.arange(8)

    @device_op(
        "u32[2](shared u8* src)",
        ptx=f"ld.shared.v2.u32 <ret>, [<src>+{displacement}];",
        effects=(reads("src", footprint=offsets, align=8),),
        name=f"load_shared_pair_{displacement}",
    )
    def load(src, src_index):
        i = np.int64(src_index) + displacement
        words = src[i : i + 8].view(np.uint32)
        return words[0], words[1]

    return load


@op_factory
def load_shared_half(displacement: int):
    """The op ``(src, src_index)``: two bytes as a number, placed as by `load_shared_words`."""

    def offsets(operands):
        return int(operands["src_index"]) + displacement + np.arange(2)

    @device_op(
        "u32(shared u8* src)",
        ptx=f"{{ .reg .b16 t; ld.shared.u16 t, [<src>+{displacement}]; cvt.u32.u16 <ret>, t; }}",
        effects=(reads("src", footprint=offsets, align=2),),
        name=f"load_shared_half_{displacement}",
    )
    def load(src, src_index):
        i = np.int64(src_index) + displacement
        return np.uint32(np.uint32(src[i]) | np.uint32(np.uint32(src[i + 1]) << np.uint32(8)))

    return load


@op_factory
def cp_async(nbytes: int):
    """The op that copies ``nbytes`` (4, 8 or 16) to shared memory asynchronously.

    The op's arguments are ``dst, dst_index, src, src_index, src_bytes``: bytes past ``src_bytes``
    are zero, and with ``src_bytes`` = 0 nothing is read. The copy belongs to the thread's open
    group and is complete after the wait that covers the group.
    """
    cache = "cg" if nbytes == 16 else "ca"

    @device_op(
        "void(shared u32* dst, global u8* src, u32 src_bytes)",
        ptx=f"cp.async.{cache}.shared.global [<dst>], [<src>], {nbytes}, <src_bytes>;",
        timing=Timing.ASYNC,
        group="cp",
        effects=(reads("src", "src_bytes", align=nbytes), writes("dst", nbytes, align=nbytes)),
        name=f"cp_async_{nbytes}",
    )
    def copy(dst, dst_index, src, src_index, src_bytes):
        d, s = np.int64(dst_index), np.int64(src_index)
        for word in range(nbytes // 4):
            value = np.uint32(0)
            for byte in range(4):
                if 4 * word + byte < np.int64(src_bytes):
                    value = np.uint32(
                        value
                        | np.uint32(np.uint32(src[s + 4 * word + byte]) << np.uint32(8 * byte))
                    )
            dst[d + word] = value

    return copy


@device_op("void()", ptx="cp.async.commit_group;", group="cp.commit", effects=())
def cp_async_commit():
    """Close the thread's open group of asynchronous copies."""


@op_factory
def cp_async_wait(open_groups: int):
    """The op that waits until at most ``open_groups`` of the thread's newest groups are open."""

    @device_op(
        "void()",
        ptx=f"cp.async.wait_group {open_groups};",
        group=f"cp.wait{open_groups}",
        effects=(),
        name=f"cp_async_wait_{open_groups}",
    )
    def wait():
        pass

    return wait
