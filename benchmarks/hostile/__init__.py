"""Hostile input: real frameworks' checkpoints, damaged by a seeded generator.

    python -m benchmarks.hostile --cases 100000 --seed 1 --checkpoints DIR
    python -m benchmarks.hostile --replay 1:4711
    python -m benchmarks.hostile.fuzz --all --seconds 180 --checkpoints DIR

`seeds` finds the checkpoints, `damage` chooses how to hurt one (`values`, `pickles`, `archives`
know formats), `case` runs reshard on it and judges what it did, `runner` spreads cases over
processes. `fuzz` hands the same damage to atheris, which looks for new branches: `targets` lists
every reader, `recipes` are cases that can be varied, `campaign` runs them in turn.
"""
