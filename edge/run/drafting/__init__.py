"""Tokens that run ahead of an answer: drafts, whether they pay, and the engine's own choices."""
