"""``resume-check``: check that training continues identically from what ``split`` writes.

command  the runs in their order, and their comparison
options  the options
program  the user's program, or our trainer, and its command line
report   the losses of every run, and the levels that layouts reached
"""
