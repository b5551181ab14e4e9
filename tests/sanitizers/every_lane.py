"""The runs of `tests.sanitizers.hopper` with kernels in which every lane arrives for itself.

racecheck does not follow lanes that meet before one of them arrives at an mbarrier for all (its
control in `tests.sanitizers.faults` shows that), and would report each handover between warps. So
it gets kernels that differ in who arrives and in nothing else.

    python -m tests.sanitizers.every_lane [matmul | fused | ffn | fp8 | operands]
"""

import os
import sys

from nbmoe_kernels import warp_arrival
from nbmoe_kernels.compiler import cache_directory


def main(argv: list[str]) -> int:
    """Run the named groups, or all."""
    # Before anything is imported that counts arrivals; and machine code is found by its source.
    assert "nbmoe_kernels.matmul_sm90_ring" not in sys.modules
    warp_arrival.ARRIVALS = 32
    os.environ["NBMOE_CACHE_DIR"] = str(cache_directory() / "every-lane")
    from tests.sanitizers.hopper import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
