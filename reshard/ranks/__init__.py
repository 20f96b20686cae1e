"""Processes that share one conversion: what they tell one another, and whether they live."""
