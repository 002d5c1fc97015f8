"""What converters can write: one format each."""
