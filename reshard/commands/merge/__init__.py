"""``merge``: write the full weights of a checkpoint.

command   the passes in their order, and the plan of the copies
options   the options
passes    the passes over the conversion, up to the files to write
filling   weights that the checkpoint lacks, from a model that has them
codes     the config of weights that are codes, or were
adapter   only a PEFT adapter
quantising  weights as codes and scales, like a quantised release
lora      a LoRA adapter, added to its base model
upload    the same files in a commit to the Hugging Face Hub, without a copy on a disk
report    what was written, cast, dropped and noted
"""
