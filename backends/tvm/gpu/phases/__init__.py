"""The phases of a pass, in one file per core."""
