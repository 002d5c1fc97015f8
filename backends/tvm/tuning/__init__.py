"""Tuning of the native engine: the search space, measuring here and on a remote device, and looking up records."""
