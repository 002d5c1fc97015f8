"""Trained additions to a model: LoRA, prompts, prefixes."""
