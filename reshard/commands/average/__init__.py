"""``average``: write the weighted mean of the weights of several checkpoints.

command  opens the checkpoints, and plans the output as `merge` does
layout   plans the output as `split` does, for --to
options  the options
report   what was averaged, and how
"""
