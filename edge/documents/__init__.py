"""The user's own documents: read, split into passages, stored, searched, and packed into prompts."""
