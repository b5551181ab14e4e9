"""Runs a sanitizer's tool over a command and reads what it prints."""

import re
import subprocess
import time
from dataclasses import dataclass

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_KERNEL_READ = re.compile(r"^=+ Uninitialized __\w+__ memory read", re.M)
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.M)
_LINE = re.compile(r"^=+ +(?!COMPUTE-SANITIZER)(?!ERROR SUMMARY)(?!RACECHECK SUMMARY)(\S.*)$", re.M)


@dataclass(frozen=True)
class Finding:
    """What a tool said about a command.

    Attributes:
        count: errors or hazards of all its processes; None if it printed no summary. Of initcheck
            what kernels read: copies to the host have rows that belong to no slot, which nobody
            writes.
        first: its first message, empty without one.
        status: the command's exit status, None if it took too long.
        output: everything printed.
        seconds: how long it took.
    """

    count: int | None
    first: str
    status: int | None
    output: str
    seconds: float = 0.0


def read_output(
    output: str, status: int | None, seconds: float = 0.0, tool: str = "memcheck"
) -> Finding:
    """What the text of a tool's run means."""
    counts = [int(count) for count in _SUMMARY.findall(output)]
    first = _LINE.search(output)
    if tool == "initcheck" and counts:
        counts = [len(_KERNEL_READ.findall(output))]
        first = first if counts[0] else None
    return Finding(
        sum(counts) if counts else None, first[1] if first else "", status, output, seconds
    )


def run_tool(sanitizer: str, tool: str, command: list[str], limit: float) -> Finding:
    """Run a command under a tool.

    Args:
        sanitizer: path of `compute-sanitizer`.
        tool: one of `TOOLS`.
        command: what to run.
        limit: seconds after which it is given up.
    """
    begin = time.perf_counter()
    # cuda.core probes for a current context, which the tool would count as an error.
    options = ["--tool", tool, "--report-api-errors", "no", "--show-backtrace", "no"]
    options += ["--print-limit", "1000000"] if tool == "initcheck" else []
    try:
        result = subprocess.run(
            [sanitizer, *options, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        output = text if isinstance(text, str) else text.decode(errors="replace")
        return read_output(output, None, time.perf_counter() - begin, tool)
    return read_output(result.stdout, result.returncode, time.perf_counter() - begin, tool)


def surprise(finding: Finding, planted: str = "") -> str:
    """What is not as it should be; empty if nothing is.

    Args:
        finding: of a run.
        planted: name of the faulty kernel that must be reported; empty: nothing may be.
    """
    if finding.status is None:
        return "took too long"
    if finding.count is None:
        return "no summary: the tool did not run"
    if planted:
        if not finding.count:
            return "the planted fault was not found"
        return "" if planted in finding.output else f"found, but not in {planted}"
    if finding.count:
        return f"{finding.count} found: {finding.first}"
    return f"exit status {finding.status}" if finding.status else ""
