"""`nbmoe demo`: the whole layer on built-in random weights; needs no file and no GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from nbmoe.cli.options import FORMATS, add_backend

NUM_EXPERTS, HIDDEN_SIZE, MOE_DIM, TOP_K = 8, 512, 352, 2
TOKENS = 64
SEED = 0


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="run a built-in random layer and check it",
        description="Run a random layer, check its bytes and its error, draw its routing.",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default=FORMATS[0], help=f"of weights (default {FORMATS[0]})"
    )
    add_backend(parser)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 if the bytes differ from the specification's or the error is too large.

    Raises:
        NbmoeError: The backend cannot be used.
    """
    from nbmoe.cli import drawing, report
    from nbmoe.cli.timing import timed_trace
    from nbmoe.nn import make_layer, random_tokens, random_weights
    from nbmoe.nn.comparison import compare_with_float64

    weights = random_weights(
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN_SIZE,
        moe_dim=MOE_DIM,
        top_k=TOP_K,
        seed=SEED,
        format=args.format,
    )
    x = random_tokens(TOKENS, HIDDEN_SIZE, SEED)
    layer = make_layer(weights, backend=args.backend)
    with drawing.Progress(sys.stdout, steps=len(layer.stages) + 2) as progress:
        trace, first_pass = timed_trace(layer, x, on_stage=progress.step)
        progress.step("the same layer by the specification (numpy)")
        specified = make_layer(weights, backend="reference")(x)
        progress.step("the same layer in float64")
        errors = compare_with_float64(weights, x, trace)

    equal = specified.tobytes() == trace.output.tobytes()
    precise = errors.arithmetic < report.ERROR_LIMIT
    origin = f"standard normal, seed {SEED}"
    print("\n" + report.layer_lines(weights, layer, len(x), origin))
    print("\n" + report.time_lines(trace, first_pass, weights))
    print("\n  tokens (columns) and the experts that they went to, first choice full:")
    print(drawing.routing_map(trace.topk_ids, layer.num_experts, sys.stdout))
    print("\n" + report.error_lines(errors, weights))
    verdict = "the same bytes" if equal else "DIFFERENT BYTES"
    print(f"  output against nbmoe.reference: {verdict} ({trace.output.nbytes} bytes)")
    if not precise:
        print(f"  THE ERROR IS ABOVE {report.ERROR_LIMIT:.0e}")
    return 0 if equal and precise else 1
