"""Compiles a kernel and assembles it with ptxas, without a GPU, and reads ptxas's report."""

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from nbmoe_kernels.compiler import architecture, compile_ptx
from nbmoe_kernels.kernel import Kernel


@dataclass(frozen=True)
class Report:
    """What ptxas says about a kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]
    local_accesses: int

    def faults(self) -> list[str]:
        """Everything that makes a kernel slow without being wrong."""
        found = list(self.warnings)
        for name in ("stack_bytes", "spill_bytes", "local_accesses"):
            if getattr(self, name):
                found.append(f"{name} = {getattr(self, name)}")
        return found


@functools.cache
def ptxas() -> str:
    """The assembler: the wheel's, so that its version fits the compiler's, or the PATH's."""
    import nvidia

    for root in nvidia.__path__:
        for path in sorted(Path(root).glob("*/bin/ptxas")):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        pytest.fail("no ptxas: the extra `test` installs it (cuda-toolkit[nvcc])")
    return found


def assemble(kernel: Kernel, cc: tuple[int, int], folder: Path) -> Report:
    """Compile for ``cc`` and assemble; fails the test if ptxas refuses."""
    ptx = compile_ptx(kernel, cc)
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas(), f"-arch={architecture(cc)}", "-v", str(source), "-o", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, result.stderr))

    return Report(
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill"),
        # C75xx: instructions were serialised or ignored.
        warnings=tuple(
            line for line in result.stderr.splitlines() if re.search(r"\bC75\d\d", line)
        ),
        local_accesses=len(re.findall(r"\b(?:ld|st)\.local\b", ptx)),
    )
