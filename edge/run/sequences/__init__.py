"""A conversation's tokens, their rows in the KV cache, and ways back into them."""
