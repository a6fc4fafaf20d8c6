"""A real language model on a packed KV cache, in PyTorch and in JAX. Start: ``python -m examples.demo``."""
