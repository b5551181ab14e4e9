"""Other projects' quantizers, called on numpy arrays. Needs the extra `oracles`; runs on a CPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def transformer_engine_nvfp4(x: np.ndarray, amax: float) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales by TransformerEngine's Python reference; `amax` is the tensor's."""
    quantizer = _transformer_engine().NVFP4QuantizerRef
    packed, scales = quantizer._quantize_blockwise_reference(
        torch.from_numpy(x.copy()),
        torch.tensor(np.float32(amax)),
        16,
        1,
        pow_2_scales=False,
        eps=0.0,
    )
    return packed.numpy(), _bytes(scales)


@cache
def _transformer_engine() -> Any:
    """TransformerEngine's reference_nvfp4.py without its package, which needs a C++ extension."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("transformer-engine is not installed")
    package = "transformer_engine.pytorch.custom_recipes"
    folder = Path(spec.submodule_search_locations[0]) / "pytorch" / "custom_recipes"
    recipes = types.ModuleType(package)
    recipes.gemm = MagicMock()  # type: ignore[attr-defined]
    tensors = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    tensors.QuantizedTensorStorage = tensors.Quantizer = object  # type: ignore[attr-defined]
    stubs = {
        "transformer_engine": types.ModuleType("transformer_engine"),
        "transformer_engine.pytorch": types.ModuleType("transformer_engine.pytorch"),
        package: recipes,
        tensors.__name__: tensors,
    }
    with patch.dict(sys.modules, stubs):
        for name in ("reference_utils", "reference_nvfp4"):
            path = folder / f"{name}.py"
            file_spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
            assert file_spec is not None and file_spec.loader is not None
            module = importlib.util.module_from_spec(file_spec)
            sys.modules[module.__name__] = module
            setattr(recipes, name, module)
            file_spec.loader.exec_module(module)
        return module


def modelopt_nvfp4(x: np.ndarray, tensor_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales by modelopt; `tensor_scale` is its weights_scaling_factor_2."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    second = torch.tensor(np.float32(tensor_scale))
    tensor, scales, _ = NVFP4QTensor.quantize(
        torch.from_numpy(x.copy()), 16, weights_scaling_factor_2=second
    )
    return tensor._quantized_data.numpy(), _bytes(scales).reshape(len(x), -1)


def torchao_nvfp4(x: np.ndarray, tensor_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales by torchao, given the tensor scale (a multiplier)."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, packed = nvfp4_quantize(
        torch.from_numpy(x.copy()), 16, torch.tensor(np.float32(tensor_scale))
    )
    return packed.numpy(), _bytes(scales)


def torchao_mx(x: np.ndarray, element: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """MX codes (packed for e2m1) and e8m0 scales by torchao, with one of its scale rules."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    dtype = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn}[element]
    scales, codes = to_mx(torch.from_numpy(x.copy()), dtype, 32, ScaleCalculationMode(rule))
    return _bytes(codes), _bytes(scales)


def torchao_blocked(scales: np.ndarray) -> np.ndarray:
    """A scale matrix in the tiled layout, flat, by torchao."""
    from torchao.prototype.mx_formats.utils import to_blocked

    return to_blocked(torch.from_numpy(scales)).numpy().ravel()


def modelopt_mxfp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """MXFP8 codes and e8m0 scales by modelopt."""
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    tensor, scales = MXFP8QTensor.quantize(torch.from_numpy(x.copy()))
    return _bytes(tensor._quantized_data), scales.numpy().reshape(len(x), -1)


def compressed_tensors_even_scales(amax: np.ndarray) -> np.ndarray:
    """e8m0 scales of MXFP4 blocks by compressed-tensors (its rule is "even")."""
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    return generate_mx_scales(torch.from_numpy(amax.copy()), 4).to(torch.uint8).numpy()


def compressed_tensors_pack(values: np.ndarray) -> np.ndarray:
    """Packs e2m1 values (not codes) two a byte, by compressed-tensors."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    return pack_fp4_to_uint8(torch.from_numpy(values.copy())).numpy()


def maker(distribution: str, call: str) -> str:
    """What a golden file says about its origin."""
    return f"{distribution} {version(distribution)}: {call}"
