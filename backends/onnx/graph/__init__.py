"""The ONNX graph of a model: its weights and their forms, its nodes, and its files."""
