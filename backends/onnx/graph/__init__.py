"""The ONNX graph of a model: which weights it has and how they are stored, its nodes, and its files."""
