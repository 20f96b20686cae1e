"""Run reshard on checkpoints of real frameworks that a seeded generator has damaged.

    python -m benchmarks.hostile --cases 100000 --seed 1 --checkpoints DIR
    python -m benchmarks.hostile --replay 1:4711
    python -m benchmarks.hostile.fuzz --all --seconds 180 --checkpoints DIR

`seeds` finds the checkpoints. `damage` chooses what to damage (`values`, `pickles` and `archives`
know the formats). `case` runs reshard on the result and checks what it did. `runner` distributes
cases over processes. `fuzz` applies the same damage with atheris, which searches for new branches:
`targets` lists every reader, `recipes` encodes cases as bytes, `campaign` runs all targets in turn.
"""
