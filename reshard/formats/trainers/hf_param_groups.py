"""The param groups of the optimizer that HF Trainer creates: with weight decay and without.

Source: transformers 5.23 ``trainer.py`` (``create_optimizer``, ``get_decay_parameter_names``) and
``trainer_pt_utils.py`` (``get_parameter_names``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from reshard.manifest import Manifest
from reshard.model import ModelShapes, library
from reshard.model.adapter_names import MATRICES, parse_part
from reshard.training.companion_files import describe_beside
from reshard.training.param_groups import replace_groups
from reshard.training.state import TrainedGroup, WritableState

COUNT = 2
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def adapt_groups(
    state: WritableState, model: ModelShapes | None
) -> tuple[WritableState, list[str]]:
    """Return the state with the param groups and keys that the Trainer's optimizer has, and notes.

    DeepSpeed makes one group if its configuration names the optimizer; the Trainer makes two of
    the same parameters, and each keeps the hyper-parameters. Groups of a script's own optimizer
    stay as they are.

    Args:
        model: the model, if the user described it; otherwise a config beside the source is used.
    """
    notes: list[str] = []
    if len(state.groups) == 1 and _has_deepspeeds_optimizer(state.manifest):
        fqns = state.groups[0].fqns
        decays = find_decays(fqns, model)
        if decays is None and model is None and library.is_installed():
            decays = find_decays(fqns, describe_beside(state.manifest))
        if decays is not None:
            state, notes = _divide(state, decays)
    # Its scheduler adds this key, and DCP loads no group without it. The value is not used again.
    groups = (
        replace(group, hyper={**group.hyper, "initial_lr": group.hyper["lr"]})
        if "lr" in group.hyper and "initial_lr" not in group.hyper
        else group
        for group in state.groups
    )
    return replace(state, groups=tuple(groups)), notes


def may_differ_in_deepspeed(state: WritableState) -> bool:
    """Return whether a DeepSpeed engine has other groups if it makes the optimizer itself."""
    return len(state.groups) > 1 and not _has_deepspeeds_optimizer(state.manifest)


def _has_deepspeeds_optimizer(manifest: Manifest) -> bool:
    """Return whether DeepSpeed made the optimizer of the source, as its configuration states."""
    config = manifest.train.config
    return isinstance(config, dict) and "optimizer" in config


def find_decays(fqns: Sequence[str], model: ModelShapes | None) -> list[bool] | None:
    """Return for each parameter whether the Trainer decays it; None if the model must be known.

    >>> find_decays(["base_model.model.q.lora_A.default.weight", "norm.weight"], None)
    [True, False]
    >>> find_decays(["transformer.ln_f.weight"], None)  # whether it is an nn.LayerNorm is unknown
    """
    found = [_decays(fqn, model) for fqn in fqns]
    return None if None in found else [bool(each) for each in found]


def _decays(fqn: str, model: ModelShapes | None) -> bool | None:
    if _NO_DECAY.search(fqn.lower()):
        return False
    part = parse_part(fqn)
    if part is not None and part.role in MATRICES:
        return True
    if model is None or fqn not in model.parameters:
        return None
    return fqn not in model.layer_norms


def _divide(state: WritableState, decays: Sequence[bool]) -> tuple[WritableState, list[str]]:
    (group,) = state.groups
    groups = [
        TrainedGroup(
            group.hyper,
            tuple(m for m, decay in zip(group.members, decays, strict=True) if decay is wanted),
        )
        for wanted in (True, False)
    ]
    divided, notes = replace_groups(state, groups, [[0], [0]])
    sizes = " and ".join(str(len(each.members)) for each in groups)
    text = (
        f"DeepSpeed's one param group becomes the Trainer's two, of {sizes} parameters, both with"
        f" weight_decay {group.hyper.get('weight_decay')}: --param-groups sets others"
    )
    return divided, [text, *notes]
