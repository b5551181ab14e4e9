"""Device code of nbmoe: the op vocabulary, the kernels and what compiles and launches them."""
