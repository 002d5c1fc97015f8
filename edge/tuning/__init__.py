"""Tuning: how candidates of an engine are searched, raced and compared, and what is recorded of it."""
