"""The prompt cache: reuses the KV rows of a prefix shared with earlier prompts."""
