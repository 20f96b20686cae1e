"""Forecasts of the memory, communication and disk of a training run, by formulas, without torch.

model            the sizes of a model: its tensors, by block, and what a block saves for backward
families         these sizes from a transformers config, by a formula for each known family
sources          these sizes from a config, a cached model, a parameter count or names and shapes
setup            the cluster and the training settings that a forecast is for
rank_share       the part of a model that one rank holds
strategies       the bytes of each strategy on a GPU, on a host, on disk and between the GPUs
strategy_choice  which strategy to use, and what saves memory if none fits
configs          configuration files and commands for a chosen strategy
"""
