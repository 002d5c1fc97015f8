"""Several requests at once: slots, their order, and the passes that they share."""
