"""A kernel's machine code for Hopper as it is shipped, and what the assembler says about it."""

import functools
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nbmoe_kernels import compiler
from nbmoe_kernels.kernel import Kernel

HOPPER = (9, 0)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)")
_LOCAL = ("LDL", "STL")
_PRODUCTS, _WARP_PRODUCTS = ("HGMMA", "QGMMA"), ("HMMA",)


@dataclass(frozen=True)
class MachineCode:
    """What a kernel became.

    Attributes:
        opcodes: instructions by name without modifiers.
        report: what ptxas prints.
    """

    opcodes: Counter[str]
    report: str

    @property
    def registers(self) -> int:
        """Of a thread at the kernel's start."""
        return sum(int(n) for n in re.findall(r"Used (\d+) registers", self.report))

    def faults(self, *, reallocates: bool, by_warps: bool = False) -> list[str]:
        """What a kernel of products and bulk copies must not do without, or must not have.

        Args:
            reallocates: whether its warpgroups hand over registers.
            by_warps: whether its products are mma.sync, not wgmma.
        """
        wanted, others = _PRODUCTS, _WARP_PRODUCTS
        if by_warps:
            wanted, others = others, wanted
        found = re.findall(r"\((C75\d\d)\)", self.report)
        found += [f"{name} found" for name in _LOCAL if self.opcodes[name]]
        found += [text for text in re.findall(r"[1-9]\d* bytes spill \w+", self.report)]
        if not any(self.opcodes[name] for name in wanted):
            found.append(f"no {' or '.join(wanted)}")
        found += [f"{name} found" for name in others if self.opcodes[name]]
        if not self.opcodes["UBLKCP"]:
            found.append("no bulk copy (UBLKCP)")
        if bool(self.opcodes["USETMAXREG"]) != reallocates:
            found.append(f"USETMAXREG: {self.opcodes['USETMAXREG']}")
        return found


@functools.cache
def nvdisasm() -> str:
    """The disassembler: the wheel's, or the PATH's."""
    import nvidia

    for root in nvidia.__path__:
        for path in sorted(Path(root).glob("*/bin/nvdisasm")):
            return str(path)
    found = shutil.which("nvdisasm")
    if found is None:
        pytest.fail("no nvdisasm: the extra `test` installs it (nvidia-cuda-nvdisasm)")
    return found


def machine_code(kernel: Kernel, folder: Path) -> MachineCode:
    """Compile and disassemble, by the route and with the options of `compiler.compile_cubin`."""
    ltoir = compiler._library(kernel).get_ltoir(compiler._target(HOPPER))
    cubin, report = _link(ltoir)
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return MachineCode(opcodes(path), report)


def opcodes(cubin: Path) -> Counter[str]:
    """A file's instructions by name without modifiers."""
    command = [nvdisasm(), "-c", str(cubin)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = Counter(name.split(".")[0] for name in _INSTRUCTION.findall(result.stdout))
    assert found["EXIT"], "nothing was disassembled"
    return found


def _link(ltoir: bytes) -> tuple[bytes, str]:
    """A cubin and ptxas's report."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={compiler.architecture(HOPPER)}", *compiler.LINK_OPTIONS, "-Xptxas=-v"]
    handle: Any = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), log.decode()
