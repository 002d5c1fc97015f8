"""How texts become tokens, and tokens texts."""
