"""Writes tests/golden/quantizers/ anew: bytes that other projects' quantizers produce.

Run it as a script where the extra `oracles` is installed. Plain tests read the files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle_inputs
import third_party

GOLDEN = Path(__file__).parents[1] / "golden" / "quantizers"


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def transformer_engine() -> dict[str, np.ndarray]:
    """Each family with a tensor amax that makes 2688 / amax a power of two, and with its own."""
    inputs, maxima, codes, scales = [], [], [], []
    for x in oracle_inputs.families(16).values():
        for amax in (5.25, 84.0, float(np.abs(x).max())):
            packed, scale = third_party.transformer_engine_nvfp4(x, amax)
            inputs.append(bf16_bits(x))
            maxima.append(amax)
            codes.append(packed)
            scales.append(scale)
    call = "NVFP4QuantizerRef._quantize_blockwise_reference(x, amax, 16, 1, pow_2_scales=False)"
    return {
        "maker": np.array(third_party.maker("transformer-engine", call)),
        "x": np.stack(inputs),
        "amax": np.array(maxima, np.float32),
        "codes": np.stack(codes),
        "scales": np.stack(scales),
    }


def torchao_mx() -> dict[str, np.ndarray]:
    """Every family with both elements and three scale rules."""
    inputs = np.stack(list(oracle_inputs.families(32).values()))
    made = {
        "maker": np.array(third_party.maker("torchao", "to_mx(x, element, 32, rule)")),
        "x": bf16_bits(inputs),
    }
    for element in ("e2m1", "e4m3"):
        for rule in ("rceil", "even", "floor"):
            results = [third_party.torchao_mx(x, element, rule) for x in inputs]
            made[f"{element} {rule} codes"] = np.stack([codes for codes, _ in results])
            made[f"{element} {rule} scales"] = np.stack([scales for _, scales in results])
    return made


def modelopt_mxfp8() -> dict[str, np.ndarray]:
    """Every family."""
    inputs = np.stack(list(oracle_inputs.families(32).values()))
    results = [third_party.modelopt_mxfp8(x) for x in inputs]
    return {
        "maker": np.array(third_party.maker("nvidia-modelopt", "MXFP8QTensor.quantize(x)")),
        "x": bf16_bits(inputs),
        "codes": np.stack([codes for codes, _ in results]),
        "scales": np.stack([scales for _, scales in results]),
    }


def mx_every_block() -> dict[str, np.ndarray]:
    """SHA-256 of scales, and of codes where torchao does not flush, for every bf16 as a maximum."""
    x = oracle_inputs.every_block()
    calls = {"modelopt": "MXFP8QTensor.quantize(x)", "torchao": "to_mx(x, element, 32, rule)"}
    made = {}
    for element in ("e2m1", "e4m3"):
        for rule in ("rceil", "even", "floor"):
            made[f"torchao {element} {rule}"] = third_party.torchao_mx(x, element, rule)
    made["modelopt e4m3 rceil"] = third_party.modelopt_mxfp8(x)
    digests = {
        name: np.array(oracle_inputs.digests(x, name.startswith("torchao"), *result))
        for name, result in made.items()
    }
    makers = [third_party.maker("torchao", calls["torchao"])]
    makers.append(third_party.maker("nvidia-modelopt", calls["modelopt"]))
    return {"maker": np.array("; ".join(makers)), **digests}


def torchao_blocked() -> dict[str, np.ndarray]:
    """Scale matrices and their tiled layout."""
    made = {"maker": np.array(third_party.maker("torchao", "to_blocked(scales)"))}
    for rows, columns in oracle_inputs.SCALE_SHAPES:
        scales = oracle_inputs.scale_matrix(rows, columns)
        made[f"{rows}x{columns} scales"] = scales
        made[f"{rows}x{columns} tiles"] = third_party.torchao_blocked(scales)
    return made


def compressed_tensors() -> dict[str, np.ndarray]:
    """Packed values, and the scale byte of every bf16 block maximum."""
    amax = oracle_inputs.block_maxima()
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    values = np.random.default_rng(5).choice(grid, (8, 64))
    call = "pack_fp4_to_uint8(values); generate_mx_scales(amax, 4)"
    return {
        "maker": np.array(third_party.maker("compressed-tensors", call)),
        "values": values,
        "packed": third_party.compressed_tensors_pack(values),
        "amax": bf16_bits(amax),
        "even scales": third_party.compressed_tensors_even_scales(amax),
    }


MAKERS = (
    transformer_engine,
    torchao_mx,
    torchao_blocked,
    modelopt_mxfp8,
    mx_every_block,
    compressed_tensors,
)


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for make in MAKERS:
        path = GOLDEN / f"{make.__name__}.npz"
        np.savez_compressed(path, **make())
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
