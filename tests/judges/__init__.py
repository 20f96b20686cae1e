"""Judges: real frameworks that write the checkpoints with which reshard is tested."""
