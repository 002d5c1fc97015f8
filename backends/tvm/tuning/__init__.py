"""Tuning: what may be chosen (space), how it is searched, how it is measured, and how a run finds what was chosen."""
