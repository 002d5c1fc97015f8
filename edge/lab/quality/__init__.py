"""Quality of KV settings: perplexity, repeated segments, retrieval, and a matrix of them all."""
