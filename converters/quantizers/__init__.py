"""Weights in fewer bits, one method per file."""
