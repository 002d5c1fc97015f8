"""Layers with a recurrent state, in NumPy."""
