"""The interpreted engine: kernels run as Python, one greenlet a CUDA thread."""
