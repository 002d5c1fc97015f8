"""Phases of layers with attention."""
