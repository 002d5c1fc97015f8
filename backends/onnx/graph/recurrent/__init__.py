"""Graphs of layers with a recurrent state."""
