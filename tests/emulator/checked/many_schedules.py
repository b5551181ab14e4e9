"""Looks for findings in the library's own kernels over many schedules; minutes a kernel.

    python -m tests.emulator.checked.many_schedules [--schedules 50] [NAME ...]

Half of the schedules are random, half pct of depth 2 and 3. Exit status 1 if there is a finding or
a byte differs from the fast engine.
"""

import argparse
import sys
import time

from tests.emulator.checked.shipped import checking
from tests.emulator.checked.test_catalog import CALLS


def main(argv: list[str] | None = None) -> int:
    """Run the kernels whose name contains one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args(argv)
    half = options.schedules // 2
    schedules = [f"random:{seed}" for seed in range(half)]
    schedules += [f"pct:{2 + seed % 2}:{seed}" for seed in range(options.schedules - half)]
    failed = 0
    for name, call in CALLS.items():
        if options.names and not any(part in name for part in options.names):
            continue
        begin = time.perf_counter()
        wanted = call()
        with checking(schedules=schedules) as executor:
            got = call()
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (got, wanted)), strict=True)
        same = all(a.tobytes() == b.tobytes() for a, b in pairs)
        failed += bool(executor.findings) or not same
        print(
            f"{name:<45} {len(executor.findings)} findings, bytes "
            f"{'equal' if same else 'differ'}, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        for finding in executor.findings:
            print(finding)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
