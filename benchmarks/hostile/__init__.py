"""Hostile input: real frameworks' checkpoints, damaged by a seeded generator.

    python -m benchmarks.hostile --cases 100000 --seed 1 --checkpoints DIR
    python -m benchmarks.hostile --replay 1:4711
    python -m benchmarks.hostile.fuzz pickle --seconds 600

`seeds` finds the checkpoints, `damage` chooses how to hurt one (`values`, `pickles`, `archives`
know formats), `case` runs reshard on it and judges what it did, `runner` spreads cases over
processes. `fuzz` hands the same damage to atheris, which looks for new branches.
"""
