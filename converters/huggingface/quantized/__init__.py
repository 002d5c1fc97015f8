"""Matrices that checkpoints store quantized: their formats, and the block types of GGUF that keep their values."""
