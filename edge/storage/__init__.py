"""Files that are ours: the cache folder, locks between processes, what a file holds, and whether it is complete."""
