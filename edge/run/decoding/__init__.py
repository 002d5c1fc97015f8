"""The loop that makes tokens, and the answers that come of it."""
