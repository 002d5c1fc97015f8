"""What threads do with vectors: products, attention, norms, and rows of the KV cache."""
