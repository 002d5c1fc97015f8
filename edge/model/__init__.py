"""A model as data: its architecture, tokenizer, chat template and prompts. No weights."""
