"""P1: other projects' quantizers, run live, agree with the reference where they should.

Needs the extra `oracles` (PyTorch and the quantizers, on a CPU). Where a library differs from the
specification, the test says by how much.
"""

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import oracle_inputs
import pytest

from nbmoe import codecs, layouts
from nbmoe.formats import E2M1, MXFP4, MXFP8, NVFP4, SCALE_RULES
from nbmoe.reference.quantize import quantize_blocks

pytestmark = pytest.mark.oracles
GOLDEN = Path(__file__).parents[1] / "golden" / "quantizers"
FAMILIES = list(oracle_inputs.families(16))


def third_party(package):
    """The adapters, or a skip that says what to install."""
    missing = [name for name in ("torch", package) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install nbmoe[oracles]")
    return importlib.import_module("third_party")


def nvfp4_differences(x, tensor_sf, packed, scales):
    """Differing scale bytes, and differing nibbles other than +0 against -0."""
    ours, our_scales = quantize_blocks(x, NVFP4, np.float32(tensor_sf))
    codes, their_codes = codecs.unpack_nibbles(ours), codecs.unpack_nibbles(packed)
    same = (codes == their_codes) | ((codes & 7 == 0) & (their_codes & 7 == 0))
    return int((our_scales != scales).sum()), ~same


@pytest.mark.parametrize("amax", [5.25, 84.0, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_nvfp4_equals_transformer_engine(family, amax):
    x = oracle_inputs.families(16)[family]
    amax = np.float32(np.abs(x).max() if amax is None else amax)
    packed, scales = third_party("transformer_engine").transformer_engine_nvfp4(x, amax)
    wrong_scales, wrong = nvfp4_differences(x, np.float32(2688) / amax, packed, scales)
    assert wrong_scales == 0
    assert wrong[np.repeat(scales != 0, 16, axis=1)].sum() == 0


@pytest.mark.parametrize("family", ["normal", "heavy tail", "ties"])
def test_nvfp4_is_near_modelopt(family):
    """modelopt divides by scale * tensor_scale: some elements next to a tie fall the other way."""
    x = oracle_inputs.families(16)[family]
    tensor_scale = np.float32(np.abs(x).max() / 2688)
    packed, scales = third_party("modelopt").modelopt_nvfp4(x, tensor_scale)
    wrong_scales, wrong = nvfp4_differences(x, 1 / tensor_scale, packed, scales)
    assert wrong_scales == 0
    assert wrong.mean() < 2e-3


@pytest.mark.parametrize("family", ["normal", "heavy tail"])
def test_nvfp4_is_near_torchao(family):
    """torchao multiplies by (1 / tensor_scale) / scale: another rounding next to ties."""
    x = oracle_inputs.families(16)[family]
    tensor_scale = np.float32(np.abs(x).max() / 2688)
    packed, scales = third_party("torchao").torchao_nvfp4(x, tensor_scale)
    wrong_scales, wrong = nvfp4_differences(x, 1 / tensor_scale, packed, scales)
    assert wrong_scales == 0
    assert wrong.mean() < 5e-3


MX = {"e2m1": MXFP4, "e4m3": MXFP8}


@pytest.mark.parametrize("element", MX)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_mx_equals_torchao(element, rule):
    for x in oracle_inputs.families(32).values():
        theirs = third_party("torchao").torchao_mx(x, element, rule)
        check_bytes(quantize_blocks(x, MX[element], rule=rule), theirs)


def test_mxfp8_equals_modelopt():
    for x in oracle_inputs.families(32).values():
        theirs = third_party("modelopt").modelopt_mxfp8(x)
        check_bytes(quantize_blocks(x, MXFP8), theirs)


def check_bytes(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("element", MX)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_every_bf16_maximum_equals_torchao(element, rule):
    """All scales. Codes where torchao does not flush (see `oracle_inputs.comparable`)."""
    x = oracle_inputs.every_block()
    codes, scales = quantize_blocks(x, MX[element], rule=rule)
    their_codes, their_scales = third_party("torchao").torchao_mx(x, element, rule)
    np.testing.assert_array_equal(scales, their_scales)
    assert (scales[np.isnan(oracle_inputs.magnitudes(x))] == 255).all()
    held = oracle_inputs.comparable(x, flushes=True)
    assert held.sum() > 62_000
    np.testing.assert_array_equal(codes[held], their_codes[held])


def test_every_bf16_maximum_equals_modelopt():
    """Everything but blocks with a NaN, to which modelopt gives a scale of 0 and mixed codes."""
    x = oracle_inputs.every_block()
    codes, scales = quantize_blocks(x, MXFP8)
    their_codes, their_scales = third_party("modelopt").modelopt_mxfp8(x)
    held = oracle_inputs.comparable(x, flushes=False)
    assert held.sum() == 65_536 - 256
    np.testing.assert_array_equal(scales[held], their_scales[held])
    np.testing.assert_array_equal(codes[held], their_codes[held])
    assert (their_scales[~held] == 0).all()
    assert (codes[~held] == 0x7F).all() and (scales[~held] == 255).all()


@pytest.mark.parametrize("shape", oracle_inputs.SCALE_SHAPES)
def test_scale_tiles_equal_torchao(shape):
    scales = oracle_inputs.scale_matrix(*shape)
    tiles = layouts.interleave_scales(scales)
    np.testing.assert_array_equal(tiles.ravel(), third_party("torchao").torchao_blocked(scales))


def test_even_scales_and_packing_equal_compressed_tensors():
    theirs = third_party("compressed_tensors")
    amax = oracle_inputs.block_maxima()
    ours = codecs.encode_e8m0(amax, E2M1, "even")
    np.testing.assert_array_equal(ours, theirs.compressed_tensors_even_scales(amax))
    values = codecs.decode_e2m1(np.random.default_rng(0).integers(0, 16, (4, 64)).astype(np.uint8))
    packed = codecs.pack_nibbles(codecs.encode_e2m1(values))
    np.testing.assert_array_equal(packed, theirs.compressed_tensors_pack(values))


GOLDEN_FILES = [
    "transformer_engine",
    "torchao_mx",
    "modelopt_mxfp8",
    "mx_every_block",
    "compressed_tensors",
]


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_are_what_the_libraries_make(name):
    third_party("transformer_engine")
    make_golden = importlib.import_module("make_golden")
    made, stored = getattr(make_golden, name)(), np.load(GOLDEN / f"{name}.npz")
    assert set(made) == set(stored.files)
    for key in set(made) - {"maker"}:
        np.testing.assert_array_equal(made[key], stored[key], err_msg=key)
