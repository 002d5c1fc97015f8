"""Writers of ONNX folders."""
