"""Kernels of products with quantized matrices."""
