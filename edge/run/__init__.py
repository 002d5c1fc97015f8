"""One session: prefill, decode, eviction, budgets, and the report of what they took."""
