"""Calls of tools: how families of models write them, grammars that force them, and a parser of generated text."""
