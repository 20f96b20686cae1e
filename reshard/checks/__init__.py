"""Comparisons of two checkpoints or two runs, and the named checks of one checkpoint.

pairs     which tensors of two checkpoints must be equal
compare   two tensors, element by element
train     everything of two training states that is no tensor
trajectory
          two runs step by step; control: one of them without its optimizer

names     the names of all checks; result: what one check found
opening   reading a source that may be damaged
quick     what can be checked without reading a tensor
scan      every byte, read once where that is possible; values: what elements are; gaps: the bytes
          that are no tensor's
deep      the checks that follow from what was seen
hashes    manifests of contents
"""
