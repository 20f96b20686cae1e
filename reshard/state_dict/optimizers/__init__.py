"""Optimizer state dicts of torch: their form, and the parameters they belong to.

states            state dicts in every keying
nested_slots      tensors nested in a slot
hyper_parameters  hyper-parameters of param groups, and counters such as the step
numbering         names for optimizers that number their parameters
layouts           how tensors are stored: whole, in runs, in flat units
selection         which of several optimizers belong to the model
"""
