"""Mutation of kernels: faults planted into real code, all of which some check must notice.

Every synchronisation is deleted, every order and scope weakened, every count changed by one, every
parity swapped, in a kernel and in the device functions that it calls. `python -m emulate mutate`
runs the mutants of the shipped kernels; see docs/emulate/mutation.md.
"""

from emulate.mutate.edits import Mutant, mutants
from emulate.mutate.run import KernelScore, Verdict, main, mutate_kernel, mutate_kernels
from emulate.mutate.subjects import Subject, subjects

__all__ = [
    "KernelScore",
    "Mutant",
    "Subject",
    "Verdict",
    "main",
    "mutants",
    "mutate_kernel",
    "mutate_kernels",
    "subjects",
]
