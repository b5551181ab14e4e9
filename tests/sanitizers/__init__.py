"""NVIDIA's sanitizers over the library's kernels, and over faults that each must find.

    python -m tests.sanitizers

on a machine with a GPU and `compute-sanitizer`. A tool that finds nothing in its planted fault, or
anything in our kernels, is a surprise: exit status 1.
"""
