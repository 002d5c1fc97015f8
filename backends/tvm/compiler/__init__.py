"""Designs, compiled in a child process and kept in the cache folder: the same for every kind of target."""
