"""Writer of Core ML packages: weights, program, and the files beside them."""

from edge.backends.checks import usual_cores as supports

__all__ = ["supports"]
