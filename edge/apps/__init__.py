"""Export for apps and pages: a C library, one model file and bindings, which run a model without Python.

The name is not `export`, since `edge.export` is the function.
"""
