"""From a stack of weights to the experts that compute with it."""

from __future__ import annotations

from collections.abc import Callable

from nbmoe.backend import Backend
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.config import QuantConfig, apply_fused_kernel_flags
from nbmoe.errors import ConfigError, ShapeError, UnsupportedError, message
from nbmoe.nn.block_experts import BlockExperts
from nbmoe.nn.experts import Experts, Put, putter
from nbmoe.nn.preparation import Prepare, preparer
from nbmoe.nn.products import BLOCK, Bf16Product, Fp8Product, Product, W4A16Product
from nbmoe.nn.row_experts import RowExperts
from nbmoe.scale_specs import ScaleOrigin
from nbmoe.strategies import Fp8Strategy, NvMxf4f8Strategy

_CONFIGS: dict[str, Callable[[], QuantConfig | None]] = {
    "nvfp4": QuantConfig.nvfp4,
    "mxfp4": QuantConfig.mxfp4,
    "mxfp8": QuantConfig.mxfp8,
    "fp8_block": QuantConfig.blockscaled_fp8,
    "fp8_row": QuantConfig.rowwise_fp8,
    "fp8_tensor": lambda: QuantConfig.tensor_fp8(ScaleOrigin.STATIC),
    "bf16": lambda: None,
}
_UNQUANTIZED: dict[str, Callable[[ExpertStack, Put, Prepare | None], Product]] = {
    "bf16": Bf16Product,
    "mxfp4": W4A16Product,
}
"""Products by bfloat16 activations, by format of the weights."""

_GRANULARITIES = {"fp8_block": "block", "fp8_row": "row", "fp8_tensor": "tensor"}
"""What shares a scale, by format of FP8 weights."""

_PREPARED = ", prepared operands"

_DTYPES = {
    ("nvfp4", "nvfp4"): "uint8",
    ("mxfp4", "mxfp4"): "uint8",
    ("mxfp8", "mxfp8"): "float8_e4m3fn",
    ("mxfp4", "mxfp8"): "float8_e4m3fn",
}
"""Element types of quantized activations by format of the weights and of the activations."""


def quant_config_of(stack: ExpertStack) -> QuantConfig | None:
    """The settings that a stack's format stands for, None for bf16; fused where it can be."""
    config = _CONFIGS[stack.format]()
    return None if config is None else apply_fused_kernel_flags(config)


def build_experts(
    api: str,
    stack: ExpertStack,
    backend: Backend,
    *,
    config: QuantConfig | None = None,
    interleaved: bool = False,
    prepared: bool | None = None,
) -> Experts:
    """The experts for the formats of a stack.

    Block formats go through `NvMxf4f8Strategy`, with the fused activation if the config says
    `can_use_fused_swiglu` and the activation is no function; FP8 goes through `Fp8Strategy`.

    Args:
        api: Public class, for messages.
        stack: The weights.
        backend: Where they go.
        config: Settings, None for the format's own.
        interleaved: Whether gate and up rows alternate in the stack.
        prepared: Whether weights and tokens are prepared; None where that is faster, which is on
            GPUs of compute capability 9.0.

    Raises:
        ArgTypeError: `prepared` is no bool.
        ConfigError: The config is of another format than the stack.
        DeviceError: The GPU's kernels do not read prepared operands.
        ShapeError: Blocks of FP8 weights that alternate would have to be padded.
        UnsupportedError: Weights of this format are not multiplied by such activations, or not
            prepared.
    """
    activation = stack.activation
    own = quant_config_of(stack)
    config = own if config is None else config
    if config is not None and (own is None or config.block_format is not own.block_format):
        rule = f"a config of {stack.format}, the format of the weights"
        raise ConfigError(message(api, "quant_config", rule, config.format.value))
    put = putter(backend)
    prepare = preparer(api, prepared, stack, backend)
    pair = (stack.format, stack.activation_format)
    product: Product | None = None
    if config is not None and pair in _DTYPES:
        strategy = NvMxf4f8Strategy(config, _DTYPES[pair], backend=backend.name)
        fused = config.can_use_fused_swiglu and activation.gated_activation_fn is None
        return BlockExperts(
            stack,
            strategy,
            activation,
            put,
            fused=fused,
            interleaved=interleaved,
            prepare=prepare,
        )
    if config is not None and pair[0] == pair[1] and stack.format in _GRANULARITIES:
        fp8 = Fp8Strategy(config, backend=backend.name)
        if fp8.granularity != _GRANULARITIES[stack.format]:
            rule = f"scales a {_GRANULARITIES[stack.format]}, as the weights have"
            raise ConfigError(message(api, "quant_config", rule, f"scales a {fp8.granularity}"))
        if fp8.scales_type != "float32":
            rule = "float32 scales, as the weights have"
            raise ConfigError(message(api, "quant_config", rule, f"{fp8.scales_type} scales"))
        if interleaved and fp8.granularity == "block" and stack.moe_dim % BLOCK:
            rule = f"D % {BLOCK} == 0 with interleaved gate and up, whose blocks cannot be padded"
            raise ShapeError(message(api, "gate_up", rule, stack.moe_dim))
        product = Fp8Product(stack, put, fp8, prepare)
    elif pair[1] == "bf16" and stack.format in _UNQUANTIZED:
        product = _UNQUANTIZED[stack.format](stack, put, prepare)
    if product is not None:
        return RowExperts(stack, product, activation, interleaved=interleaved)
    known = (*_DTYPES, *((f, f) for f in _GRANULARITIES), *((f, "bf16") for f in _UNQUANTIZED))
    rule = f"weights x activations of one of {', '.join(' x '.join(pair) for pair in known)}"
    raise UnsupportedError(message(api, "weights", rule, " x ".join(pair)))


def strategy_name(stack: ExpertStack, experts: Experts) -> str:
    """The strategy and the path that experts take, for reports."""
    if isinstance(experts, BlockExperts):
        name = f"{experts.strategy!r}, {'fused' if experts.fused else 'chained'} activation"
        return name + (_PREPARED if experts.prepared else "")
    assert isinstance(experts, RowExperts), "there are two kinds"
    product = experts.product
    if isinstance(product, Fp8Product):
        return repr(product.strategy) + (_PREPARED if product.prepared else "")
    name = "bf16 matmul" if stack.format == "bf16" else f"bf16 matmul of {stack.format} weights"
    return name + (_PREPARED if product.prepared else "")
