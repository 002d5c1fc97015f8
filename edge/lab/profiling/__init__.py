"""Measurements of `edge profile`, one kind per file; `collect.py` combines them, `verdict.py` draws the conclusion."""
