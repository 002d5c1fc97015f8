"""The CPU as a target: instruction sets, kernels, threads, and compiled code in memory."""
