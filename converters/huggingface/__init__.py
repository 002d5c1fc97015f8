"""Reader and writer of Hugging Face folders: config.json, safetensors, the tokenizer."""
