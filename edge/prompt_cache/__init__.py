"""The prompt cache: the prefix that a prompt shares with earlier ones is not run again."""
