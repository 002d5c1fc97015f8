"""Models as others store them, as GGUF."""
