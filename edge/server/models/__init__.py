"""Loaded models within one memory budget: their leases, their threads, and the jobs of these."""
