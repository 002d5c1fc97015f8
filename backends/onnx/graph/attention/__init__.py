"""Graphs of layers with attention."""
