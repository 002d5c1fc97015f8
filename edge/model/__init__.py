"""A model as data, without weights: its architecture, tokenizer, chat template and prompts."""
