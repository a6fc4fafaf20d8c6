"""A real language model on a packed KV cache; start with ``python -m examples.demo``."""
