"""The context switch of aarch64, run on whatever machine has qemu: registers and stacks survive."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from emulate.fast import switch

_GENERAL = [f"x{i}" for i in range(19, 30)]
_VECTOR = [f"d{i}" for i in range(8, 16)]


def _set(base: int) -> str:
    """Put known values into all callee-saved registers."""
    lines = [f"mov {name}, #{base + i}" for i, name in enumerate(_GENERAL)]
    lines += [f"mov x9, #{base + 50 + i}\nfmov {name}, x9" for i, name in enumerate(_VECTOR)]
    return "\n".join(lines)


def _check(base: int) -> str:
    """Fail unless they hold these values."""
    lines = [f"cmp {name}, #{base + i}\nb.ne fail" for i, name in enumerate(_GENERAL)]
    lines += [
        f"fmov x9, {name}\ncmp x9, #{base + 50 + i}\nb.ne fail" for i, name in enumerate(_VECTOR)
    ]
    return "\n".join(lines)


def _switch(save: str, to: str) -> str:
    return f"adr x0, {save}\nadr x1, {to}\nldr x1, [x1]\nbl {switch.SYMBOL}"


def _program() -> str:
    """Two fibers that take turns; the process ends with 0 if nothing got lost."""
    words, entry = 20, 11  # of a new fiber's frame
    return f"""
    .text
    .global _start
_start:
    adr x0, stack_end
    sub x0, x0, #{64 + 8 * words}
    adr x1, fiber
    str x1, [x0, #{8 * entry}]
    adr x2, sp_fiber
    str x0, [x2]
    mov x10, sp
    adr x2, sp_main
    str x10, [x2, #16]
{_set(100)}
{_switch("sp_main", "sp_fiber")}
{_check(100)}
{_set(500)}
{_switch("sp_main", "sp_fiber")}
{_check(500)}
    adr x2, sp_main
    ldr x9, [x2, #16]
    mov x10, sp
    cmp x9, x10
    b.ne fail
    mov x0, #0
    b leave
fail:
    mov x0, #1
leave:
    mov x8, #93
    svc #0
fiber:
    mov x0, sp
    and x0, x0, #15
    cbnz x0, fail
{_set(300)}
{_switch("sp_fiber", "sp_main")}
{_check(300)}
{_set(700)}
{_switch("sp_fiber", "sp_main")}
    b fail
{switch.SYMBOL}:
{switch.ASSEMBLY["aarch64"]}
    .balign 16
    .space 4096
stack_end:
sp_main:
    .quad 0, 0, 0
sp_fiber:
    .quad 0
"""


def _tools() -> list[list[str]] | None:
    """Assembler, linker and what runs the program; None if this machine lacks one of them."""
    native = platform.system() == "Linux" and switch.MACHINE == "aarch64"
    names = ["as", "ld"] if native else [f"aarch64-linux-gnu-{tool}" for tool in ("as", "ld")]
    tools = [shutil.which(name) for name in names]
    runner = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if None in tools or not (native or runner):
        return None
    return [[str(tool)] for tool in tools] + [[] if native else [str(runner)]]


def _run(folder: Path, program: str) -> int:
    tools = _tools()
    if tools is None:
        pytest.skip("needs binutils and qemu-user for aarch64")
    assembler, linker, runner = tools
    source, code, file = folder / "switch.s", folder / "switch.o", folder / "switch"
    source.write_text(program)
    subprocess.run([*assembler, "-o", code, source], check=True)
    subprocess.run([*linker, "-N", "-o", file, code], check=True)  # code and data in one segment
    return subprocess.run([*runner, file], timeout=60, check=False).returncode


def test_aarch64_switch_keeps_registers_and_stacks(tmp_path):
    assert _run(tmp_path, _program()) == 0


@pytest.mark.parametrize("lost", ["stp x27, x28, [sp, #64]", "ldp d14, d15, [sp, #144]"])
def test_a_switch_that_loses_registers_is_found(tmp_path, lost):
    text = _program()
    assert lost in text
    assert _run(tmp_path, text.replace(lost, "nop")) != 0
