"""Grammars of answers: as users pass them (`grammar.py`), and the tokens that they allow next (`matcher.py`, over
llguidance)."""
