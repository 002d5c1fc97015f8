"""The native engine's side of tuning: the search space, and looking up records."""
