"""Kernels of the GPU engine, in TVM's IR."""
