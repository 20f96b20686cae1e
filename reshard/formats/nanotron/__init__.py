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

from __future__ import annotations

from reshard.formats.nanotron import directory
from reshard.formats.place import Place
from reshard.manifest import Manifest

NAME = "nanotron"


def detect(place: Place) -> bool:
    """Whether a checkpoint of nanotron lies at this directory, or around this file of one."""
    return directory.locate(place) is not None


def read(place: Place) -> Manifest:
    """Read a step's directory, or that of a file of it.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: files of different grids or runs are mixed.
        UnsupportedError: a form of which nobody has seen a file.
    """
    from reshard.formats.nanotron import reader

    found = directory.locate(place)
    return reader.read(directory.census(found or place))
