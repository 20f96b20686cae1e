"""Checkpoints in object stores, by fsspec: paths, ranged reads, uploads. Imported when one is used.

What is read is fetched in few, large, concurrent pieces; what is written becomes whole before it
becomes visible. Every request that may succeed another time is made again, with growing waits.
"""
