"""P1: PyTorch and FP8 quantizers built on it agree with the reference.

Needs the extra `oracles`. PyTorch's elementwise float32 is IEEE's, and its cast to float8_e4m3fn
rounds to nearest even; `torch._scaled_mm` multiplies as cuBLAS does, on a CPU in float32.
"""

import importlib
import importlib.util

import ml_dtypes
import numpy as np
import oracle_inputs
import pytest

from nbmoe import reference

pytestmark = pytest.mark.oracles
FAMILIES = oracle_inputs.families(16)
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
dynamic = reference.quantize_dynamic_scaled_float8


def needed(*packages):
    """The modules, or a skip that says what to install."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install nbmoe[oracles]")
    return [importlib.import_module(name) for name in packages]


def groups_of(torch, x, group):
    """(M, G, group) bf16 tensor and its largest magnitudes in float32."""
    values = torch.from_numpy(x.astype(np.float32)).reshape(len(x), -1, group)
    return values, values.abs().amax(dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", [128, 256])
def test_groups_equal_pytorch(family, group):
    """amax / 448, x times the inverse, clamp, cast: what vLLM does a token group."""
    (torch,) = needed("torch")
    x = FAMILIES[family].astype(BF16)
    values, amax = groups_of(torch, x, group)
    scale = amax.clamp(max=1200.0) / 448.0
    inverse = torch.where(scale == 0, torch.zeros(()), 1.0 / scale)
    codes = (values * inverse[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    ours, scales = dynamic(x, group_size_or_per_token=group)
    np.testing.assert_array_equal(
        ours.view(np.uint8), codes.reshape(x.shape).view(torch.uint8).numpy()
    )
    np.testing.assert_array_equal(scales[:, : len(x)].T, scale.numpy())


@pytest.mark.parametrize("family", ["normal", "heavy tail", "wide"])
def test_bfloat16_scales_equal_compressed_tensors(family):
    """Its dynamic FP8 quantization a token keeps scales in the activations' bfloat16."""
    torch, quantization = needed("torch", "compressed_tensors.quantization")
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    x = FAMILIES[family].astype(BF16)
    tensor = torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    args = quantization.QuantizationArgs(
        num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True
    )
    lowest, highest = tensor.amin(dim=-1, keepdim=True), tensor.amax(dim=-1, keepdim=True)
    scales, _ = utils.calculate_qparams(lowest, highest, args)
    assert scales.dtype is torch.bfloat16
    ours = dynamic(x, scales_type="bfloat16", scale_ub=3e38)[1][0, : len(x)]
    theirs = scales[:, 0].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(ours.view(np.uint16), theirs)


@pytest.mark.parametrize("family", ["normal", "heavy tail", "wide"])
def test_static_codes_equal_pytorch(family):
    (torch,) = needed("torch")
    x = FAMILIES[family]
    inverse = torch.tensor(np.float32(1) / np.float32(0.0123))
    codes = (torch.from_numpy(x.copy()) * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    for dtype in (np.float32, BF16):
        ours = reference.quantize_static_scaled_float8(x.astype(dtype), 0.0123)
        np.testing.assert_array_equal(ours.view(np.uint8), codes.view(torch.uint8).numpy())


def test_ue8m0_scales_equal_torchao():
    """RCEIL of amax / 448, where neither the floor of 1e-10 nor its quotient's rounding shows."""
    needed("torch", "torchao")
    third_party = importlib.import_module("third_party")
    for x in oracle_inputs.families(32).values():
        codes, scales = third_party.torchao_mx(x, "e4m3", "rceil")
        ours, our_scales = dynamic(
            x.astype(BF16), group_size_or_per_token=32, scales_type="float8_e8m0fnu"
        )
        live = np.abs(x.reshape(len(x), -1, 32)).max(axis=-1) > 1e-6
        mine = our_scales[:, : len(x)].T.view(np.uint8)
        np.testing.assert_array_equal(mine[live], scales[live])
        wide = np.repeat(live, 32, axis=1)
        np.testing.assert_array_equal(ours.view(np.uint8)[wide], codes[wide])


def test_rows_and_tensors_are_near_scaled_mm():
    """The same product in another order of sums."""
    (torch,) = needed("torch")
    rng = np.random.default_rng(0)
    m, n, k = 48, 64, 704
    a, b = (rng.standard_normal((rows, k)).astype(np.float32).astype(E4M3) for rows in (m, n))
    as_torch = [torch.from_numpy(v.view(np.uint8)).view(torch.float8_e4m3fn) for v in (a, b)]
    starts, ids = np.array([0, m], np.uint32), np.zeros(1, np.int32)
    for shapes in (((m, 1), (1, n)), ((1, 1), (1, 1))):
        scales = [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes]
        a_scale, b_scale = (torch.from_numpy(s) for s in scales)
        if shapes[0] == (1, 1):
            a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
        theirs = torch._scaled_mm(
            as_torch[0], as_torch[1].t(), a_scale, b_scale, out_dtype=torch.bfloat16
        )
        ours = reference.grouped_rowwise_dynamic_scaled_fp8_matmul(
            a, b[None], scales[0], scales[1].reshape(1, -1, 1), starts, ids
        )
        magnitude = np.abs(a.astype(float)) @ np.abs(b.astype(float)).T * scales[0] * scales[1]
        difference = np.abs(ours.astype(float) - theirs.float().numpy())
        # A bfloat16 rounding each, and the sums' own errors.
        allowed = np.abs(ours.astype(float)) * 2.0**-7 + magnitude * 2.0**-17
        assert (difference <= allowed).all()
        assert (difference == 0).mean() > 0.9


def test_blocks_are_near_dequantized_pytorch():
    """Dequantize both sides in float64 and multiply, as DeepSeek's reference does in float32."""
    (torch,) = needed("torch")
    rng = np.random.default_rng(1)
    m, n, k = 20, 136, 352
    a, b = (rng.standard_normal((rows, k)).astype(np.float32).astype(E4M3) for rows in (m, n))
    a_scales = rng.uniform(0.5, 2, (3, m)).astype(np.float32)
    b_scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)

    def dequantized(codes, scales):
        wide = torch.from_numpy(scales).double().repeat_interleave(128, dim=1)[:, :k]
        return torch.from_numpy(codes.astype(np.float64)) * wide

    left = dequantized(a, a_scales.T.copy())
    right = dequantized(b, np.repeat(b_scales, 128, axis=0)[:n])
    exact = (left @ right.T).numpy()
    starts, ids = np.array([0, m], np.uint32), np.zeros(1, np.int32)
    ours = reference.grouped_dynamic_scaled_fp8_matmul(
        a, b[None], a_scales, b_scales[None], starts, ids
    ).astype(float)
    magnitude = (left.abs() @ right.abs().T).numpy()
    assert (np.abs(ours - exact) <= np.abs(exact) * 2.0**-8 + magnitude * 2.0**-17).all()
