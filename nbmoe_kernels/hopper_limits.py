"""What an SM of compute capability 9.0 has, and whether it has enough for a config."""

from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig

SM_SHARED_BYTES = 228 * 1024
BLOCK_SHARED_BYTES = 227 * 1024
RESERVED_SHARED_BYTES = 1024
"""Of every block, by the system."""
SM_REGISTERS = 65536
THREAD_REGISTERS = 255
SM_THREADS = 2048


REGISTERS = {
    (8,): 72,
    (8, 16): 96,
    (16, 32): 96,
    (16, 32, 64): 136,
    (48, 56, 64, 72, 80): 232,
    (80, 88, 96, 104, 112): 232,
    (112, 120, 128, 136, 144): 232,
}
"""By widths, as ptxas reports for the kernels, all formats: accumulators, two sets of A, addresses
and the loop. Each further width costs registers, although only one is in use at a time. Sets of
five need more than the 168 that a block of 384 threads starts with; 232 are enough."""


def cannot_run(config: HopperMatmulConfig, num_active: int) -> str:
    """Why a GPU of compute capability 9.0 cannot run a config as it says; empty if it can."""
    if num_active > config.max_slots:
        # The schedule's table lies in shared memory; its size is the kernel's.
        return f"its table holds {config.max_slots} slots"
    if config.warp_products and config.stage_blocks % 2:
        return "its warps take the 64-blocks of a stage in pairs"
    if config.threads * config.blocks_per_sm > SM_THREADS:
        return f"an SM has {SM_THREADS} threads"
    return lacks_memory(config) or lacks_registers(config)


def lacks_memory(config: HopperMatmulConfig) -> str:
    """Why the ring of stages does not fit; empty if it does."""
    if config.shared_bytes > BLOCK_SHARED_BYTES:
        return (
            f"a block needs {config.shared_bytes} bytes of shared memory, it can have "
            f"{BLOCK_SHARED_BYTES}"
        )
    needed = config.blocks_per_sm * (config.shared_bytes + RESERVED_SHARED_BYTES)
    if needed > SM_SHARED_BYTES:
        return f"its blocks need {needed} bytes of shared memory, an SM has {SM_SHARED_BYTES}"
    return ""


def lacks_registers(config: HopperMatmulConfig) -> str:
    """Why a config would spill, or wait for ever for registers; empty if it does not."""
    needed = registers_needed(config)
    at_start = SM_REGISTERS // (config.threads * config.blocks_per_sm) // 8 * 8
    if config.registers is None:
        available = min(at_start, THREAD_REGISTERS)
        if needed > available:
            return f"a thread needs about {needed} registers, there are {available}"
        return ""
    # Reallocation hands out what the block got at its start, and waits for ever for more.
    producer, consumer = config.registers
    handed_out = 128 * producer + config.consumers * consumer
    if handed_out > at_start * config.threads:
        return f"it hands out {handed_out} registers, the block has {at_start * config.threads}"
    if needed > consumer:
        return f"a consumer's thread needs about {needed} registers, it has {consumer}"
    return ""


def registers_needed(config: HopperMatmulConfig) -> int:
    """Of a consumer's thread, for the products not to be serialised or spilled."""
    several = len(config.widths) - 1
    estimate = config.max_width // 2 + 2 * 16 + 36 + 20 * several
    return REGISTERS.get(config.widths, min(estimate, THREAD_REGISTERS))
