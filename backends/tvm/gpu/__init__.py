"""GPUs as targets of the native engine: TVM's kernels in WGSL, CUDA, OpenCL or Metal."""
