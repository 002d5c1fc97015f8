"""File formats, read without trusting anything in them."""
