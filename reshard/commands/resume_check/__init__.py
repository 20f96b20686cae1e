"""``resume-check``: whether training goes on the same from what ``split`` writes."""
