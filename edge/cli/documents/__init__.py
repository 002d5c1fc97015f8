"""Commands for the user's own documents: index, ask, embed, rank."""
