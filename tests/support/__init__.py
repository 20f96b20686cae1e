"""Helpers that tests share.

Modules:
    browser: drives a headless Chromium, to look at the pages that reshard writes.
    budget: compares the size of the code with the committed numbers.
    computed: bytes that are computed in tiles when they are read.
    crashed: recognizes ranks that native code killed, which are then started once more.
    digests: short digests of tensors, which samples keep instead of the tensors.
    faults: a process whose disk calls can be killed, lose power, fail or be interrupted.
    forked: starts programs as forks of one process that has imported what they need.
    guides: runs the commands and the Python code of README, docs/index.md and docs/start.
    large_manifests: manifests of runs with thousands of ranks, computed without files.
    megatron: proves a model family with Megatron-core: ``python -m tests.support.megatron CONFIG``.
    model_configs: configurations of models whose memory was measured on a GPU.
    object_stores: servers of S3 and Google's store behind a proxy that injects network faults.
    package_contents: compares the wheel and the source distribution with the source tree.
    random_checkpoints: small checkpoints in real files, stored in every way a manifest can express.
    sample_tensors: one tensor of every shape, stride and dtype that a checkpoint may hold.
    same_objects: whether two objects are equal in types, order of keys, and bits of tensors.
    screenshots: takes pictures of pages, for people to look at.
    signal_points: the points of a program at which a signal's handler can run.
"""
