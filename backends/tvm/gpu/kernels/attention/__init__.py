"""Kernels of layers with attention, and of their rows."""
