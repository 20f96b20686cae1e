"""Checkpoints of ColossalAI's Booster: weights with an index, and an optimizer by number.

ColossalAI gathers tensor, sequence and ZeRO parallelism before it saves, and removes padding rows:
files contain whole tensors. ``save_model(shard=True)`` writes ``pytorch_model.bin.index.json`` (or
``model.safetensors.index.json``) with its shards, ``save_optimizer(shard=True)``
``pytorch_optim.bin.index.json`` (number -> shard) with ``pytorch_optim_group.bin``; with pipeline
parallelism the shards are ``...-stage-000SS-shard-000NN.bin``. Both are in one directory or, as in
its examples, in ``modeling/`` and ``optimizer/`` with ``lr_scheduler`` and ``running_states.json``
beside them. Numbers count the parameters of the unsharded model's param groups.

Source: ColossalAI 0.5.0 ``checkpoint_io/general_checkpoint_io.py``,
``checkpoint_io/hybrid_parallel_checkpoint_io.py``, ``checkpoint_io/utils.py``,
``booster/plugin/hybrid_parallel_plugin.py`` (get_param_info); ``applications/Colossal-LLaMA``
(``ckpt_io.py``).

    format      the format as one object: detection, reading and writing
    directory   the folders of weights and optimizer
    reader      weights, optimizer, scheduler and running states
    writer      the files of an optimizer on another grid
"""
