"""Tensors of a checkpoint: read, selected, compared and computed.

lazy      tensors in memory, of which any block can be read without the rest
weights   which tensor is the weight of a parameter, and the dtype to write
replicas  copies of one block on several ranks, compared or averaged
adapters  LoRA adapters, and their products added to a base model
averages  weighted means of several checkpoints
schedule_free
          the averages of a schedule-free optimizer, from the weights that it trains
"""
