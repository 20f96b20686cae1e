"""Checkpoints of nanotron: one safetensors file per parameter and rank, which states its slices.

    format      the format as one object: detection, reading and writing
    directory   the files of a checkpoint, and the check that none is missing
    slices      the block of a tensor that a rank's file stores, from its header
    optimizer   the ranks' optimizers: whole local tensors, or ZeRO-1's pieces of them
    reader      the whole checkpoint as one manifest
    stages      the parameters of each pipeline stage, of the source and of other grids; the stage
                that nanotron gives a block, by its cost
    layout      facts about the run beside its state: how parameters are cut, who trains them
    model       the traits of the run's model, from which its Hugging Face family follows
    begin       the run that a state of another framework becomes
    choice      the requested run, and refusals of what cannot be written
    writer      the files of other ranks

Source: nanotron at 2411b02 (April 2026), checkpoint version 1.5: ``serialize/weights.py``,
``serialize/optimizer.py``, ``serialize/metadata.py``, ``serialize/utils.py``, ``optim/zero.py``,
``optim/named_optimizer.py``, ``optim/gradient_accumulator.py``, ``trainer.py`` (save_checkpoint).
"""
