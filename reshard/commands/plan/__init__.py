"""``plan``: which strategy fits a cluster, what it needs, and the configuration for it.

command  finds the model and the settings of the training, and chooses
options  the options
report   the table of strategies, the choice and its reason
"""
