"""The phases of a pass, from one barrier to the next, and the builder that they share."""
