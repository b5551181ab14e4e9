"""The fast engine: kernels compiled by Numba's CPU target, one fiber a CUDA thread."""
