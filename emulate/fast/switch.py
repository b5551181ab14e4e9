"""The context switch between fibers: one external function, assembled by llvmlite from text.

``emulate_switch(save, to)`` pushes the callee-saved registers of the C ABI, stores the stack
pointer at ``*save``, takes ``to`` as the stack pointer and pops. A naked function has no prologue,
and its call is opaque to LLVM, so no value is kept in a register over it.
"""

import platform

import llvmlite.binding as llvm

from emulate.errors import UnsupportedPlatform

SYMBOL = "emulate_switch"

_X86_64 = """
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
"""
# The jump goes through a register because a `ret` to a new fiber's entry would be refused by
# machines that check return addresses (CET).

_AARCH64 = """
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
"""

ASSEMBLY = {"x86_64": _X86_64, "aarch64": _AARCH64}
_ALIASES = {"AMD64": "x86_64", "arm64": "aarch64"}
MACHINE = _ALIASES.get(platform.machine(), platform.machine())

FRAME_WORDS = {"x86_64": 8, "aarch64": 20}.get(MACHINE, 0)
"""Words of a new fiber's first frame. On x86-64 seven are popped, which leaves the stack pointer at
8 modulo 16 at the entry, as after a call: code that spills vectors faults otherwise."""
FRAME_ENTRY = {"x86_64": 6, "aarch64": 11}.get(MACHINE, 0)
"""Which of these words holds the address of the entry."""

_engine: llvm.ExecutionEngine | None = None


def check_platform() -> None:
    """Raise unless this machine can run fibers.

    Raises:
        UnsupportedPlatform: on anything but x86-64 and aarch64 with the System V or AAPCS64 ABI.
    """
    if MACHINE not in ASSEMBLY or platform.system() == "Windows":
        raise UnsupportedPlatform(
            f"the fast engine runs on Linux and macOS on x86-64 and aarch64, not on "
            f"{platform.system()} {platform.machine()}"
        )


def install() -> None:
    """Assemble the switch and make its symbol known to LLVM; does nothing the second time."""
    global _engine
    if _engine is not None:
        return
    check_platform()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    text = ASSEMBLY[MACHINE].strip().replace("\n", r"\0A")
    module = llvm.parse_assembly(
        f"define void @{SYMBOL}(i64 %save, i64 %to) naked noinline nounwind "
        f'{{ call void asm sideeffect "{text}", ""() unreachable }}'
    )
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    llvm.add_symbol(SYMBOL, engine.get_function_address(SYMBOL))
    _engine = engine
