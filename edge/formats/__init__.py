"""Readers and writers of file formats. Nothing in a file is trusted."""
