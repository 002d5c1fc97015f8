"""A model as a Core ML package: its weights, its program, and the files beside it."""
