"""``merge``: the full weights."""
