"""What a prompt consists of: tokens, rows that are given, places."""
