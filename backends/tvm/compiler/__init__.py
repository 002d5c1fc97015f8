"""Compilation of designs in a child process, and the cache of the results, for every kind of target."""
