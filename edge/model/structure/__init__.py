"""What a model is made of: its layers, its shapes."""
