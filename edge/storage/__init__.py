"""Files of our own: the cache folder, completion records, locks between processes, fingerprints of files."""
