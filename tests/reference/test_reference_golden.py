"""P1: the reference equals bytes that other projects' quantizers produced."""

from pathlib import Path

import numpy as np
import pytest

from nbmoe import codecs, layouts
from nbmoe.formats import E2M1, MXFP4, MXFP8, NVFP4, SCALE_RULES
from nbmoe.reference.quantize import quantize_blocks
from tests.oracles.oracle_inputs import digests, every_block

GOLDEN = Path(__file__).parents[1] / "golden" / "quantizers"
FORMATS = {"e2m1": MXFP4, "e4m3": MXFP8}


def load(name):
    return np.load(GOLDEN / f"{name}.npz")


def positive_zero(codes):
    """TransformerEngine's reference drops the sign of zero; the card keeps it."""
    return np.where(codes == 8, 0, codes)


def test_nvfp4_equals_transformer_engine():
    z = load("transformer_engine")
    compared = 0
    for bits, amax, packed, scales in zip(z["x"], z["amax"], z["codes"], z["scales"], strict=True):
        tensor_sf = np.float32(2688) / amax
        got, got_scales = quantize_blocks(codecs.decode_bf16(bits), NVFP4, tensor_sf)
        np.testing.assert_array_equal(got_scales, scales)
        # Where a scale rounds to zero the codes are theirs 6, ours 0: both mean zero.
        used = np.repeat(scales != 0, 16, axis=1)
        ours, theirs = (positive_zero(codecs.unpack_nibbles(p)) for p in (got, packed))
        np.testing.assert_array_equal(ours[used], theirs[used])
        assert (ours[~used] == 0).all()
        compared += used.sum()
    assert compared > 70_000


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_mx_equals_torchao(element, rule):
    z = load("torchao_mx")
    codes, scales = quantize_blocks(codecs.decode_bf16(z["x"]), FORMATS[element], rule=rule)
    np.testing.assert_array_equal(scales, z[f"{element} {rule} scales"])
    np.testing.assert_array_equal(codes, z[f"{element} {rule} codes"])


def test_mxfp8_equals_modelopt():
    z = load("modelopt_mxfp8")
    codes, scales = quantize_blocks(codecs.decode_bf16(z["x"]), MXFP8)
    np.testing.assert_array_equal(scales, z["scales"])
    np.testing.assert_array_equal(codes, z["codes"])


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_every_bf16_maximum_equals_torchao(element, rule):
    """Digests of the bytes of 65,536 blocks; the live test shows where they differ."""
    x = every_block()
    ours = digests(x, True, *quantize_blocks(x, FORMATS[element], rule=rule))
    assert ours == load("mx_every_block")[f"torchao {element} {rule}"].tolist()


def test_every_bf16_maximum_equals_modelopt():
    x = every_block()
    ours = digests(x, False, *quantize_blocks(x, MXFP8))
    assert ours == load("mx_every_block")["modelopt e4m3 rceil"].tolist()


def test_scale_tiles_equal_torchao():
    z = load("torchao_blocked")
    shapes = {name.split()[0] for name in z.files if " " in name}
    assert len(shapes) == 5
    for shape in shapes:
        tiles = layouts.interleave_scales(z[f"{shape} scales"])
        np.testing.assert_array_equal(tiles.ravel(), z[f"{shape} tiles"])


def test_packing_and_even_scales_equal_compressed_tensors():
    z = load("compressed_tensors")
    packed = codecs.pack_nibbles(codecs.encode_e2m1(z["values"]))
    np.testing.assert_array_equal(packed, z["packed"])
    scales = codecs.encode_e8m0(codecs.decode_bf16(z["amax"]), E2M1, "even")
    np.testing.assert_array_equal(scales, z["even scales"])


def test_every_file_names_its_maker():
    makers = {path.stem: str(load(path.stem)["maker"]) for path in GOLDEN.glob("*.npz")}
    assert set(makers) == {
        "transformer_engine",
        "torchao_mx",
        "torchao_blocked",
        "modelopt_mxfp8",
        "mx_every_block",
        "compressed_tensors",
    }
    assert makers["transformer_engine"].startswith("transformer-engine ")
