"""Models in Hugging Face's layout, read and written: config.json, safetensors, the tokenizer."""
