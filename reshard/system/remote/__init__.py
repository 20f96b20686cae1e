"""Checkpoints in object stores, accessed by fsspec. Imported only when a URL is used.

Reads fetch few large ranges concurrently. Output becomes visible only after it is complete. Every
request that may succeed later is repeated, with growing waits.

path      a URL with the methods of `pathlib.Path`
store     one object store: its fsspec filesystem and cached folder listings
attempts  repetition of requests, and the errors if that does not help
reading   ranged reads
parts     uploads of files in parts
objects   listing and removal of many objects
"""
