"""What makes a checkpoint believed: comparison, checks, and training that goes on the same.

pairs     which tensors of two checkpoints must be equal
compare   two tensors, element by element
train     everything of two training states that is no tensor
"""
