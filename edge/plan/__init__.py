"""Plans: check options, try configurations, the best first, count their bytes, and take the first that fits."""
