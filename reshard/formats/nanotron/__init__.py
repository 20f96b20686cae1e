"""Checkpoints that nanotron wrote: one safetensors file a parameter and rank, which says its place.

    directory   which files there are, and whether all of them
    slices      which block of a tensor a rank's file holds, as its header says
    optimizer   the ranks' optimizers: whole local tensors, or ZeRO-1's pieces of them
    reader      all of it as one manifest
    stages      what each pipeline stage trains, and the same on other stages
    costs       which stage nanotron gives a block, by what it costs
    layout      what a run says beside its state: how parameters are cut, and who trains them
    choice      what is to be written of that, and what cannot be
    target      the files of other ranks

Facts: nanotron at 2411b02 (April 2026), checkpoint version 1.5: ``serialize/weights.py``,
``serialize/optimizer.py``, ``serialize/metadata.py``, ``serialize/utils.py``, ``optim/zero.py``,
``optim/named_optimizer.py``, ``optim/gradient_accumulator.py``, ``trainer.py`` (save_checkpoint).
"""

from reshard.formats.nanotron.directory import NAME, detect

__all__ = ["NAME", "detect"]
