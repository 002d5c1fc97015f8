"""Concurrent requests: slots, their order, and the passes that they share."""
