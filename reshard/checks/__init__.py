"""Comparisons of two checkpoints or two runs, and the named checks of one checkpoint.

identity  evidence that the files of a checkpoint belong together
history   the checkpoints of one run, compared with one another

pairs     which tensors of two checkpoints must be equal
compare   compares two tensors element by element
train     compares two training states apart from their tensors: steps, groups, scheduler
unread    compares the files that no reader used
trajectory
          compares the logs of two runs step by step; control: wipes the optimizer of a copy

names     the names of all checks; result: what one check found
opening   opens a source that may be damaged
quick     the checks that read no tensor data
scan      reads every byte, once if possible; element_facts: examines elements (NaN, signs, zeros);
          gaps: finds bytes between tensors
deep      the checks that use the results of the scan
hashes    manifests of contents: the digests of every tensor
files     digests of files in blocks, to check a part of a checkpoint
digests   SHA-256, and BLAKE3 if it is installed
"""
