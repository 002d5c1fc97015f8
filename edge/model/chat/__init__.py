"""Messages and their parts become a prompt by a chat template."""
