"""The computations of a thread: products, attention, norms, and rows of the KV cache."""
