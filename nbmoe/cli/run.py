"""`nbmoe run`: one MoE layer of a checkpoint on tokens from a file or at random."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.cli.options import add_backend, count
from nbmoe.errors import ConfigError, DTypeError, ShapeError, message

_API = "run"
_DEFAULT_TOKENS = 16


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "run",
        help="run an MoE layer of a checkpoint",
        description="Run router, experts and combination of one MoE layer of a checkpoint.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("--layer", type=count, help="decoder layer (default: the first with MoE)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--input", type=Path, metavar="x.npy", help="tokens, float32 [T, H]")
    source.add_argument(
        "--tokens", type=count, metavar="N", help=f"N random tokens (default {_DEFAULT_TOKENS})"
    )
    parser.add_argument("--seed", type=count, default=0, help="seed of random tokens")
    parser.add_argument(
        "--output", type=Path, metavar="y.npy", help="write float32 [T, H] that holds bf16 values"
    )
    add_backend(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        NbmoeError: The checkpoint, the input or the backend cannot be used.
        OSError: A file cannot be read or written.
    """
    from nbmoe.checkpoints import read_layer
    from nbmoe.cli import drawing, report
    from nbmoe.nn import make_layer, random_tokens
    from nbmoe.nn.comparison import compare_with_float64

    _require_folder(args.output)
    weights = read_layer(args.checkpoint, args.layer)
    layer = make_layer(weights, backend=args.backend)
    if args.input is None:
        tokens = _DEFAULT_TOKENS if args.tokens is None else args.tokens
        x, origin = random_tokens(tokens, layer.hidden_size, args.seed), f"seed {args.seed}"
    else:
        x, origin = _load_tokens(args.input, layer.hidden_size), f"from {args.input}"
    if not args.json:
        print(report.layer_lines(weights, layer, len(x), origin), flush=True)
    trace, first_pass = _pass(layer, x)
    errors = compare_with_float64(weights, x, trace)
    if args.output is not None:
        with args.output.open("wb") as file:
            np.save(file, trace.output.astype(np.float32))
    if args.json:
        print(json.dumps(report.as_dictionary(weights, layer, trace, first_pass, errors)))
        return 0
    print("\n" + report.time_lines(trace, first_pass, weights))
    print("\n" + report.error_lines(errors, weights))
    rows = report.rows_per_expert(layer, trace)
    print(f"\n  rows per expert (at most {rows.max()}):")
    print(drawing.load_strip(rows, sys.stdout))
    if args.output is not None:
        print(f"\n  wrote {args.output}: float32 {list(trace.output.shape)} holding bf16 values")
    return 0


def _pass(layer: Any, x: Any) -> tuple[Any, float | None]:
    """Runs the layer, with a progress bar if someone watches."""
    from nbmoe.cli.drawing import Progress
    from nbmoe.cli.timing import timed_trace

    if not sys.stderr.isatty():
        return timed_trace(layer, x)
    with Progress(sys.stderr, steps=len(layer.stages)) as progress:
        return timed_trace(layer, x, on_stage=progress.step)


def _require_folder(output: Path | None) -> None:
    """Fails before the work rather than after it."""
    if output is not None and not output.parent.is_dir():
        found = f"no folder {output.parent}"
        raise FileNotFoundError(message(_API, "--output", "a file in an existing folder", found))


def _load_tokens(path: Path, hidden_size: int) -> npt.NDArray[Any]:
    from nbmoe.codecs import encode_bf16

    try:
        x = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ConfigError(message(_API, "--input", "a .npy file", str(error))) from error
    if not isinstance(x, np.ndarray):
        raise ConfigError(message(_API, "--input", "a .npy file", type(x).__name__))
    if x.dtype != np.float32:
        hint = "save with numpy.save(path, x.astype(numpy.float32))"
        raise DTypeError(message(_API, "--input", "float32", x.dtype, hint))
    if x.ndim != 2 or x.shape[1] != hidden_size:
        raise ShapeError(message(_API, "--input", f"(T, {hidden_size})", x.shape))
    return encode_bf16(x)
