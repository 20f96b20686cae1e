"""The checkpoints of one run compared with one another: is each what training made of the last?

tags      the checkpoints of a run, and what their files state: steps, updates, learning rates
movement  reads the same elements of all checkpoints, and counts what changed from one to the next
checks    the named checks
"""
