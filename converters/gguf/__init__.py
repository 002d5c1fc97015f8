"""Writers of GGUF files: matrices rounded, merged, mixed."""
