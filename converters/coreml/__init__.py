"""Writer of Core ML packages: weights, program, and the files beside them."""
