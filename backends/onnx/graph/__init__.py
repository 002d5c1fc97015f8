"""The ONNX graph of a model: weights and their forms, nodes, and files."""
