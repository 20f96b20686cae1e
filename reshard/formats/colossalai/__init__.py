"""Checkpoints of ColossalAI's Booster: weights under an index, and an optimizer by number beside.

Tensor, sequence and ZeRO parallelism are gathered before anything is saved, and padding rows are
cut off: files hold whole tensors. ``save_model(shard=True)`` writes
``pytorch_model.bin.index.json`` (or ``model.safetensors.index.json``) with its shards,
``save_optimizer(shard=True)``
``pytorch_optim.bin.index.json`` (number -> shard) with ``pytorch_optim_group.bin``; with pipeline
parallelism the shards are ``...-stage-000SS-shard-000NN.bin``. Both lie in one directory or, as its
examples have it, in ``modeling/`` and ``optimizer/`` with ``lr_scheduler`` and
``running_states.json`` beside. Numbers count the parameters of the unsharded model's param groups.

Source: ColossalAI 0.5.0 ``checkpoint_io/general_checkpoint_io.py``,
``checkpoint_io/hybrid_parallel_checkpoint_io.py``, ``checkpoint_io/utils.py``,
``booster/plugin/hybrid_parallel_plugin.py`` (get_param_info); ``applications/Colossal-LLaMA``
(``ckpt_io.py``).

    directory   where weights and optimizer lie
    reader      weights, optimizer, scheduler and running states
    target      the files of an optimizer on another grid
"""

from reshard.formats.colossalai.directory import NAME, detect

__all__ = ["NAME", "detect"]
