"""``merge``: the full weights.

command   what is done, in order
options   what the user can ask for
filling   weights that the checkpoint lacks, from a model that has them
adapter   a LoRA adapter alone
report    what was written, cast, dropped and noted
"""
