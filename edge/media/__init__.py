"""Pictures and sounds as arrays: reading of files, within limits."""
