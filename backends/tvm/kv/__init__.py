"""The native engine's KV cache on the host: regions of heads, row formats, and reflections of keys."""
