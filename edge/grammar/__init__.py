"""Grammars that answers keep to: what users pass (`grammar.py`), and what says which tokens may follow
(`matcher.py`, over llguidance)."""
