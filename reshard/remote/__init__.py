"""Checkpoints in object stores, by fsspec: paths, ranged reads, uploads. Imported when one is used.

What is read is fetched in few, large, concurrent pieces; what is written becomes whole before it
becomes visible. Every request that may succeed another time is made again, with growing waits.

path      a URL with the methods of `pathlib.Path`
store     one object store: its filesystem by fsspec, what its folders list
attempts  requests made again, and what is said where that does not help
reading   ranged reads
writing   files of this machine sent, and read back
partial   the place where an output grows; lease: who writes there
publish   what was sent gets its name
"""
