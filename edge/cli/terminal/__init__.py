"""The terminal: output, help, prompts and signals of all commands."""
