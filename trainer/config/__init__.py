"""The configuration files of DeepSpeed and Accelerate, read into settings, unmodified.

``choices`` holds what was chosen and where; ``rules`` walks a file along a table of what each of
its fields means here; ``deepspeed`` and ``accelerate`` are those tables.
"""
