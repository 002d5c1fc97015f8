"""Packing of weights for the native kernels: block types, layout, and the packed file."""
