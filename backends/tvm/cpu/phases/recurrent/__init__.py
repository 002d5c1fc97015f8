"""Phases of layers with a recurrent state, and what they share."""
