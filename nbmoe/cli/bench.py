"""`nbmoe bench`: our kernels, our chain, and other libraries, on the same routing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbmoe.bench.entry import LEGS
from nbmoe.bench.models import DEFAULT_MODELS, find_model
from nbmoe.bench.routing import SKEWS
from nbmoe.cli.options import count
from nbmoe.errors import ConfigError, DeviceError, message

CARD = "card"
TOKENS = "1,16,128,4096"
_API = "bench"
_WRITE_EVERY_S = 5.0


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure the kernels on a GPU, beside other libraries",
        description="Measure mixture-of-experts layers on a GPU: every kernel, gate/up with down, "
        "the whole layer as one graph, and the same products by other libraries.",
    )
    parser.add_argument(
        "--models", default=",".join(DEFAULT_MODELS), help="names, or `list` (default %(default)s)"
    )
    parser.add_argument("--tokens", default=TOKENS, help="numbers (default %(default)s)")
    parser.add_argument(
        "--skew", choices=SKEWS, default=SKEWS[0], help="of the routing (default %(default)s)"
    )
    parser.add_argument("--seed", type=count, default=0, help="of the routing (default 0)")
    parser.add_argument("--formats", default="", help="ours, or `none` (default all)")
    parser.add_argument(
        "--legs", default="", help=f"out of {', '.join((*LEGS, CARD))} (default all)"
    )
    parser.add_argument(
        "--peers", default="auto", help="auto, none, or names (default %(default)s)"
    )
    parser.add_argument(
        "--runs", type=count, default=15, help="repetitions measured (default %(default)s)"
    )
    parser.add_argument(
        "--time-limit", type=count, default=0, metavar="S", help="begin nothing after S seconds"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="call everything once and time nothing, which fills the caches of compilers",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write tables to FILE")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 if nothing could be measured.

    Raises:
        NbmoeError: An argument is wrong, or there is no usable GPU.
        OSError: A file cannot be written.
    """
    from nbmoe.bench import report
    from nbmoe.bench.models import MODELS
    from nbmoe.bench.peers import chosen_peers

    if args.models == "list":
        for model in MODELS.values():
            sizes = f"{model.experts} experts, top {model.top_k}, hidden {model.hidden}"
            print(f"{model.name:<22} {sizes}, moe dim {model.moe_dim}")
        return 0
    legs = _names("--legs", args.legs, (*LEGS, CARD))
    peers, missing = chosen_peers(args.peers)
    plan = make_plan(args, legs, peers)
    for path in (args.json, args.markdown):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(message(_API, "file", "an existing folder", path.parent))
    _require_gpu()

    from nbmoe.bench import card
    from nbmoe.bench.memory import Memory
    from nbmoe.bench.runner import Runner
    from nbmoe.bench.timing import Timer

    timer, memory = Timer(), Memory()
    facts = card.facts(timer)
    print(f"{facts['card']}, driver {facts['driver']}, CUDA {facts['cuda']}")
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    facts["measured"] = []
    if CARD in legs and not args.once:
        for fact in card.measure(timer, memory):
            facts["measured"].append(fact)
            print(card.line(fact), flush=True)
    about = facts | {
        "skew": plan.skew,
        "seed": plan.seed,
        "runs": plan.runs,
        "routing_is_torchs": _draws_as_torch(plan.seed) if peers else None,
        "missing_peers": missing,
    }
    output = _Output(args, about)
    output.rows = Runner(plan, timer, memory, output.show).run()
    output.write()
    if not args.once:
        print("\n" + report.markdown(output.rows))
    measured = any(row.times for row in output.rows) or facts["measured"]
    return 0 if args.once or measured else 1


class _Output:
    """Shows rows as they come, and writes files now and then, so that little is lost in a hang."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self.rows: list[Any] = []
        self._args, self._about = args, about
        self._written = time.monotonic()

    def show(self, row: Any) -> None:
        """Prints a row, under a heading if it is the first of its model."""
        from nbmoe.bench import report

        if not self.rows or self.rows[-1].model != row.model:
            print(f"\n{row.model}\n{report.HEADING}")
        print(report.line(row), flush=True)
        self.rows.append(row)
        if time.monotonic() > self._written + _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Writes the files that were asked for."""
        from nbmoe.bench import report

        if self._args.json is not None:
            command = command_line(self._args)
            report.dump(str(self._args.json), report.document(self.rows, self._about, command))
        if self._args.markdown is not None:
            self._args.markdown.write_text(report.markdown(self.rows))
        self._written = time.monotonic()


def command_line(args: argparse.Namespace) -> str:
    """The command that does the same again; files are left out."""
    words = ["nbmoe", "bench"]
    for name in ("models", "tokens", "skew", "seed", "formats", "legs", "peers", "runs"):
        value = str(getattr(args, name))
        if value:
            words += [f"--{name}", f'"{value}"' if " " in value else value]
    return " ".join(words)


def make_plan(args: argparse.Namespace, legs: Sequence[str], peers: Sequence[Any]) -> Any:
    """The plan of the arguments.

    Raises:
        ConfigError: A name or a number is wrong.
    """
    from nbmoe.bench.formats import FORMATS
    from nbmoe.bench.runner import Plan

    formats = () if args.formats == "none" else _names("--formats", args.formats, tuple(FORMATS))
    return Plan(
        models=tuple(find_model(name.strip()) for name in args.models.split(",")),
        tokens=_numbers("--tokens", args.tokens),
        skew=args.skew,
        formats=formats,
        legs=tuple(legs),
        peers=tuple(peers),
        seed=args.seed,
        runs=max(1, args.runs),
        time_limit=args.time_limit,
        once=args.once,
    )


def _names(arg: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a list with commas, all known ones for an empty list."""
    if not text:
        return known
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(message(_API, arg, f"names out of {', '.join(known)}", repr(name)))
    return names


def _numbers(arg: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise ConfigError(message(_API, arg, "numbers above 0 with commas between", repr(text)))
    return tuple(int(part) for part in parts)


def _require_gpu() -> None:
    from nbmoe.backend import problem

    if trouble := problem("gpu"):
        hint = "it measures GPUs; `nbmoe demo` runs the kernels without one"
        raise DeviceError(message(_API, "GPU", "a usable GPU", trouble.reason, hint))


def _draws_as_torch(seed: int) -> bool:
    """Whether torch's generator gives this GPU the numbers that the routing was drawn with."""
    import numpy as np
    import torch

    from nbmoe.bench.routing import uniform_draw

    shape = 4096, 128
    generator = torch.Generator("cuda").manual_seed(seed)
    theirs = torch.rand(*shape, device="cuda", generator=generator).cpu().numpy()
    return bool(np.array_equal(theirs, uniform_draw(*shape, seed)))
