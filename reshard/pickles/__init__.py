"""Pickles as data: read without running a byte of them, written as Python writes them."""
