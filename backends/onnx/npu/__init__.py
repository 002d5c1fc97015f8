"""NPUs: graphs of fixed sizes, compiled by the vendor's compiler, with our KV cache."""
