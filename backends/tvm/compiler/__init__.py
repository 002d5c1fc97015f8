"""Compiles designs in a child process, caches them, and exports them: the same for every kind of target."""
