"""From logits to the next token: samplers and their constraints; thoughts, calls and stop strings of an answer."""
