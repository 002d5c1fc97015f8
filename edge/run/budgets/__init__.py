"""Budgets of memory, time and energy: meters measure, the governor decides, and concurrent generations share."""
