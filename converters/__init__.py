"""Models from one format into another."""
