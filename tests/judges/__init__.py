"""Judges: real frameworks that write the checkpoints which reshard is tested against."""
