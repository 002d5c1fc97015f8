"""Tuning: search, race and compare the candidates that an engine offers, and record the result."""
