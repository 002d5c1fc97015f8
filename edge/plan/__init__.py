"""Plans: check options, try configurations from the best on, count their bytes, and take the first that fits."""
