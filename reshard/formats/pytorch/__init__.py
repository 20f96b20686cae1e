"""Directories of PyTorch-native training: DCP, rank files, whole files, in any mixture.

Accelerate, HF Trainer, Lightning, verl, torchtitan, FairScale and plain scripts differ in how they
name these parts; what is in them is told by its form (`state_dict.sections`).

    format      the format as one object: how it is found, read and written
    directory   which files are parts, and whether there are any
    ranks       the files that ranks saved, as one
    reader      every part at a place as one manifest
    provenance  what the parts' names say: who wrote them, at which step
    layouts     the layouts that PyTorch-native training loads
    writer      one file, as a script without sharding saves it

Names: Accelerate 1.15 ``utils/constants.py`` and ``fsdp_utils.py``; transformers 5 ``trainer.py``;
Lightning 2.6 ``strategies/fsdp.py`` (``meta.pt``); verl 0.9 ``fsdp_checkpoint_manager.py``;
torchtitan 0.3 ``components/checkpoint.py``.
"""
