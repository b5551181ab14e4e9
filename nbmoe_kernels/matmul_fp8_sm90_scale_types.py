"""The types that the weights' scales of Hopper's FP8 matmul may have."""

from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.op import device_function


@device_function
def _f32_of_f32(scale):
    return scale


SCALE_POINTERS = {"f32": ("f32", _f32_of_f32), "bf16": ("u16", f32_of_bf16)}
"""By type: element of the scales' pointer, and what makes an f32 of one."""
