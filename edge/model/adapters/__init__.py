"""What is trained beside a model: LoRA, prompts, prefixes."""
