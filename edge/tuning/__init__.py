"""Tuning: searching, racing and comparing the candidates that an engine offers, and the record of the result."""
