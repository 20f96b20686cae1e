"""Adapters of PEFT: which tensors belong to one, and whether its configuration fits them."""
