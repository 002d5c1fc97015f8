"""What a pass does between two barriers: one file for each kind of work."""
