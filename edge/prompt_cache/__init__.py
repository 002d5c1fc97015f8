"""The prompt cache: what a prompt shares with earlier ones is not run again."""
