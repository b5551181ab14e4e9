"""The whole FFN by the reference: its two matmuls, one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbmoe import layouts, reference
from nbmoe.codecs import encode_bf16
from nbmoe.layouts import activation_tiles
from nbmoe.ops.launch import host_view
from nbmoe.ops.prepared_product import reference_products
from nbmoe.ops.product import optional_view, reference_arguments
from nbmoe.prepared.product import multiply_prepared
from nbmoe.prepared.tokens import pack_tokens
from nbmoe.reference.swiglu import activate_and_quantize
from nbmoe.validate.mega_ffn import FFN
from nbmoe.validate.product import Product
from nbmoe.validate.product_prepared import PreparedProduct


def ffn_packed(ffn: FFN, match_bf16: bool) -> Any:
    """(M, N) bfloat16 of packed operands on the host."""
    p, down = ffn.gate_up, ffn.down
    assert isinstance(p, Product) and down.scales is not None, "packed operands have scales"
    operands, keywords = reference_arguments(p)
    codes, scales = reference.grouped_matmul_blocked_swiglu(
        *operands,
        **keywords,
        c_input_scales=_factors(ffn),
        activation=ffn.activation,
        match_bf16=match_bf16,
    )
    s = p.slots
    return reference.grouped_matmul_block_scaled(
        codes,
        host_view(down.weight),
        scales,
        host_view(down.scales),
        host_view(s.starts),
        host_view(s.offsets),
        host_view(s.ids),
        expert_scales=optional_view(down.expert_scales),
        bias=optional_view(down.bias),
        format=ffn.fmt,
        weight_format=ffn.weight_fmt,
    )


def ffn_prepared(ffn: FFN, match_bf16: bool) -> Any:
    """(M, N) bfloat16 of prepared operands on the host."""
    p, down = ffn.gate_up, ffn.down
    assert isinstance(p, PreparedProduct) and down.prepared is not None, "checked"
    starts, ids = host_view(p.groups.starts), host_view(p.groups.ids)
    offsets = np.ascontiguousarray(layouts.scales_offset(starts))
    codes, scales = activate_and_quantize(
        reference_products(p),
        ffn.fmt,
        starts,
        offsets,
        ids,
        _factors(ffn),
        num_tiles=activation_tiles(p.num_rows, p.groups.count),
        activation=ffn.activation,
        match_bf16=match_bf16,
    )
    products = multiply_prepared(
        pack_tokens(codes, scales, starts, offsets, format=ffn.fmt.name),
        replace(down.prepared, data=host_view(down.weight)),
        starts,
        ids,
        expert_scales=optional_view(down.expert_scales),
        a_row_scales=None,
        bias=optional_view(down.bias),
    )
    return encode_bf16(products)


def _factors(ffn: FFN) -> Any:
    return None if ffn.factors is None else host_view(ffn.factors)[: ffn.groups.count]
