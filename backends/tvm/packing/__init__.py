"""Packing weights for kernels of every target: the file's layout, the file, and the block types."""
