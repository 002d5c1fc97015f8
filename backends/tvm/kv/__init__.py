"""The native engine's KV cache, as the host sees it."""
