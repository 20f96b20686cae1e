"""A LoRA checkpoint of the transformers Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from tests.judges import library_models as models
from tests.judges import library_trainer
from tests.judges import library_truth as truth

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judges.library_cases import Case


def make(case: Case, ckpt: Path) -> truth.Truth:
    """The adapters as PEFT names them in the file; the live name has ``.default`` in it."""
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(models.build(case.factory), config)
    trainer = library_trainer.train(case, model, ckpt)
    found = library_trainer.tell(trainer, model, model)
    adapters = get_peft_model_state_dict(model)
    short = {name: name.replace(".default.", ".") for name in found["optimizer"]}
    if set(short.values()) != set(adapters):
        raise AssertionError("the optimizer does not hold the adapters alone")
    groups = [{**g, "params": [short[name] for name in g["params"]]} for g in found["groups"]]
    return {
        **found,
        "params": {name: truth.whole(value) for name, value in adapters.items()},
        "buffers": {},
        "tied": {},
        "frozen": [],
        "optimizer": {short[name]: slots for name, slots in found["optimizer"].items()},
        "steps": {short[name]: step for name, step in found["steps"].items()},
        "groups": groups,
    }
