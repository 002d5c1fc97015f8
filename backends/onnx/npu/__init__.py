"""NPUs: graphs of fixed sizes, compiled by the vendor, with the same KV cache as everywhere."""
