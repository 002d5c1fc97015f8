"""Commands that measure speed and quality, and look for settings."""
