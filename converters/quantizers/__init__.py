"""Quantization methods, one per file."""
