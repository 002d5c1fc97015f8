"""Models that are loaded, within one budget: who has them, and what their threads run."""
