"""What apps and pages get: a C library, one model file and bindings, with which an app runs a model without Python.

The name is not `export`, since `edge.export` is the function.
"""
