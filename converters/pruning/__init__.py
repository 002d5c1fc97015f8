"""Smaller models: layers and channels removed, and what that cost repaired."""
