"""Tokens that run ahead of an answer: drafts, whether they pay, and what the engine chooses itself."""
