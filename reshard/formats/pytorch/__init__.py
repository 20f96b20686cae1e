"""Directories of PyTorch-native training: DCP, rank files, whole files, in any mixture.

Accelerate, HF Trainer, Lightning, verl, torchtitan, FairScale and plain scripts differ in how they
name these parts; their content is identified by its structure (`state_dict.sections`).

    format      the format as one object: detection, reading and writing
    directory   the names of parts, and detection by them
    ranks       the files of all ranks, joined
    rank_parts  plain tensors that are parts, joined by the user's rules
    lost_files  errors that name the files of ranks that are missing
    stages      the pipeline stages among them, joined
    reader      every part in a directory as one manifest
    torchtune   its optimizer, under the names of the weights
    torch_checkpointing  its safetensors files of ranks
    provenance  the framework and the step that the parts' names state
    layouts     the layouts that PyTorch-native training loads

Names: Accelerate 1.15 ``utils/constants.py`` and ``fsdp_utils.py``; transformers 5 ``trainer.py``;
Lightning 2.6 ``strategies/fsdp.py`` (``meta.pt``); verl 0.9 ``fsdp_checkpoint_manager.py``;
torchtitan 0.3 ``components/checkpoint.py``.
"""
