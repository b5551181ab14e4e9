"""The least time that work can take: every byte moved once, no launch, perfect overlap."""

from __future__ import annotations

from dataclasses import dataclass

from nbmoe.bench.models import Model
from nbmoe.bench.routing import Problem
from nbmoe.errors import ConfigError, message

BANDWIDTH = 4.3e12
"""What a copy on an H200 reaches [B/s]."""
RATES = {16: 780e12, 8: 1300e12}
"""What dense products of 16-bit and 8-bit operands reach on an H200, random data [flop/s]."""

ELEMENT_BYTES = {
    "bf16": 2.0,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "mxfp8": 1 + 1 / 32,
    "fp8_block": 1 + 4 / 128**2,  # a scale a block of 128 x 128
    "fp8_group": 1 + 4 / 128,  # a scale 128 values of a row
    "fp8_row": 1.0,  # a scale a row
}
"""Bytes of an element, its share of block scales included."""


@dataclass(frozen=True)
class Work:
    """What something has to do at least.

    Attributes:
        bytes: Read and written.
        flops: Multiplications and additions.
        flop_us: What they take at the practical rate [us].
    """

    bytes: float = 0
    flops: float = 0
    flop_us: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.bytes + other.bytes, self.flops + other.flops, self.flop_us + other.flop_us
        )

    @property
    def floor_us(self) -> float:
        """No run can be shorter [us]."""
        return max(self.bytes / BANDWIDTH * 1e6, self.flop_us)


def element_bytes(name: str) -> float:
    """Bytes of an element of a format.

    Raises:
        ConfigError: There is no such format.
    """
    if name not in ELEMENT_BYTES:
        raise ConfigError(message("bench", "format", f"one of {tuple(ELEMENT_BYTES)}", name))
    return ELEMENT_BYTES[name]


def product_bits(activations: str, weights: str) -> int:
    """Width of the operands that the tensor core can multiply without loss [bits]."""
    eight = all(name.startswith(("fp8", "mxfp8")) for name in (activations, weights))
    w4a8 = activations.startswith(("fp8", "mxfp8")) and weights == "mxfp4"
    return 8 if eight or w4a8 else 16


def matmul(problem: Problem, leg: int, activations: str, weights: str) -> Work:
    """A grouped matmul: weights of active experts and packed rows in, bf16 rows out.

    Args:
        problem: Rows and where they go.
        leg: 0 for gate/up, 1 for down.
        activations: Format of the rows.
        weights: Format of the weights.
    """
    n, k = problem.model.matmuls[leg]
    moved = problem.active * n * k * element_bytes(weights)
    moved += problem.rows * (k * element_bytes(activations) + n * ELEMENT_BYTES["bf16"])
    flops = 2.0 * problem.rows * n * k
    return Work(moved, flops, flops / RATES[product_bits(activations, weights)] * 1e6)


def pair(problem: Problem, activations: str, weights: str) -> Work:
    """Both matmuls."""
    return sum((matmul(problem, leg, activations, weights) for leg in (0, 1)), Work())


def fused(problem: Problem, activations: str, weights: str) -> Work:
    """Gate and up with the activation and its quantization: packed rows of D out instead."""
    plain = matmul(problem, 0, activations, weights)
    d = problem.model.moe_dim
    saved = 2 * d * ELEMENT_BYTES["bf16"] - d * element_bytes(activations)
    return Work(plain.bytes - problem.rows * saved, plain.flops, plain.flop_us)


def quantize(problem: Problem, activations: str) -> Work:
    """Tokens in (each once), rows in expert order out."""
    k = problem.model.hidden
    read = problem.tokens * k * ELEMENT_BYTES["bf16"]
    return Work(read + problem.rows * k * element_bytes(activations))


def prepare(problem: Problem, leg: int, activations: str) -> Work:
    """Rows of a matmul's operand in; 16-bit rows out, of 8-bit formats 8-bit ones."""
    k = problem.model.matmuls[leg][1]
    out = 1.0 if activations.startswith("fp8") else 2.0
    return Work(problem.rows * k * (element_bytes(activations) + out))


def activate(problem: Problem, activations: str) -> Work:
    """Rows of gate and up in, quantized activations out."""
    d = problem.model.moe_dim
    return Work(problem.rows * d * (2 * ELEMENT_BYTES["bf16"] + element_bytes(activations)))


def logits(problem: Problem) -> Work:
    """Tokens and the gate's weight in, f32 logits out."""
    tokens, experts, hidden = problem.tokens, problem.model.experts, problem.model.hidden
    flops = 2.0 * tokens * experts * hidden
    moved = (tokens + experts) * hidden * ELEMENT_BYTES["bf16"] + 4 * tokens * experts
    return Work(moved, flops, flops / RATES[16] * 1e6)


def route(problem: Problem) -> Work:
    """Logits in; ids, weights and the order of rows out."""
    return Work(problem.tokens * problem.model.experts * 4 + problem.rows * 20)


def combine(problem: Problem) -> Work:
    """Rows of the down projection in, tokens out."""
    row = problem.model.hidden * ELEMENT_BYTES["bf16"]
    return Work((problem.rows + problem.tokens) * row + problem.rows * 8)


def layer(problem: Problem, activations: str, weights: str) -> Work:
    """Tokens in and out once, weights once, the activations written and read once."""
    model: Model = problem.model
    both = pair(problem, activations, weights)
    weight_bytes = problem.active * 3 * model.hidden * model.moe_dim * element_bytes(weights)
    tokens = 2 * problem.tokens * model.hidden * ELEMENT_BYTES["bf16"]
    inner = 2 * problem.rows * model.moe_dim * element_bytes(activations)
    return Work(weight_bytes + tokens + inner, both.flops, both.flop_us)
