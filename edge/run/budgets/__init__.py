"""Budgets of memory, time and energy: meters read what is spent, the governor decides, sequences share."""
