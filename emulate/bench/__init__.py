"""Speed of the engines next to Numba's simulator: `python -m emulate bench`."""
