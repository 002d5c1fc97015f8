"""Models by name: files, folders, packages, and the table of current models."""
