"""Compiles designs in a child process and caches them: the same for every kind of target."""
