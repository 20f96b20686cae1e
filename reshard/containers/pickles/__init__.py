"""Pickles as data: read without running any of their code, written as Python writes them."""
