"""``resume-check``: whether training goes on the same from what ``split`` writes.

command  what is done, in order: every run, and what they are compared with
options  what the user can ask for
program  the user's program, or our trainer, and how it is called
report   every run's losses, and which levels each layout reached
"""
