"""``verify``: check whether checkpoints are complete and sound.

command  one checkpoint
files    single files, or ranges of one, against a manifest
history  the checkpoints of one run compared with one another
options  the options
report   the result of the checks
single   the checks of one checkpoint
"""
