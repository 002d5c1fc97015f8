"""What `edge profile` measures, one file per thing; `collect.py` puts it together, `limits.py` draws the conclusion."""
