"""FP8 quantize with a scale a group or a row: which kernel runs, and on what grid."""

from typing import Any

from nbmoe_kernels import quantize_fp8_groups as groups
from nbmoe_kernels.kernel import Executor
from nbmoe_kernels.quantize_fp8_rows import make_quantize_fp8_rows

MAX_GRID_Y = 65535


def launch_quantize_fp8(
    executor: Executor,
    codes: Any,
    scales: Any,
    input: Any,
    row_offsets: Any,
    *,
    num_slots: int,
    num_rows: int,
    num_cols: int,
    group: int,
    padded_rows: int,
    scale_bytes: int,
    scale_ub: float,
    amax_floor: float,
    no_array: Any,
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types.

    ``row_offsets`` is not read if ``num_slots`` is 0. ``scale_bytes`` says the type of ``scales``:
    4 f32, 2 bf16, 1 e8m0. ``no_array`` is the executor's empty array or null address.
    """
    num_groups = -(-num_cols // group)
    by_type = [scales if scale_bytes == size else no_array for size in (4, 2, 1)]
    in_vectors = num_cols % 8 == 0 and group % 8 == 0
    chunks = -(-num_groups // groups.CHUNK)
    if in_vectors and group <= groups.MAX_GROUP and chunks <= MAX_GRID_Y:
        groups.make_quantize_fp8_groups().launch(
            executor,
            (-(-padded_rows // groups.ROWS), chunks, 1),
            codes,
            *by_type,
            input,
            row_offsets,
            num_slots,
            num_rows,
            num_cols,
            group,
            padded_rows,
            scale_bytes,
            scale_ub,
            amax_floor,
            stream=stream,
        )
        return
    make_quantize_fp8_rows("bf16x8" if in_vectors else "bf16").launch(
        executor,
        (padded_rows * num_groups, 1, 1),
        codes,
        *by_type,
        input,
        row_offsets,
        num_slots,
        num_rows,
        num_cols,
        group,
        num_groups,
        padded_rows,
        scale_bytes,
        scale_ub,
        amax_floor,
        stream=stream,
    )
