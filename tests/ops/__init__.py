"""The public operations on every backend that can run here, held to the reference byte for byte."""
