"""CPU targets: instruction sets, kernels, threads, arguments of a pass, and compiled code in memory."""
