"""Megatron-LM and Megatron-core checkpoints."""
