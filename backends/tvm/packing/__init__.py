"""Weights re-laid for the kernels: the layout, the packed file, and the block types."""
