"""``merge``: write the full weights of a checkpoint.

command   the steps in their order
options   the options
filling   weights that the checkpoint lacks, from a model that has them
adapter   only a LoRA adapter
report    what was written, cast, dropped and noted
"""
