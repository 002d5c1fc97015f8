"""What a KV setting costs in quality: perplexity, repeated segments, retrieval, and the table of them all."""
