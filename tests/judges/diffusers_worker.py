"""Diffusers' own models, hooks and average under Accelerate: train and save, load and train on.

The hooks are those of ``examples/text_to_image``: ``train_text_to_image.py`` (``unet/`` and
``unet_ema/``) and ``train_text_to_image_lora_sdxl.py`` (one file of LoRA weights).
`train` is a job for `worlds.run_in_turn`, in a process that called `enter`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import get_linear_schedule_with_warmup

from tests.judges import programs, ranks

PROGRAM = "diffusers"
STEPS, BATCH = 3, 4
CROSS = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")


def enter() -> None:
    """Import diffusers once."""
    programs.enter(PROGRAM)
    import diffusers.loaders.lora_pipeline
    import diffusers.training_utils  # noqa: F401


def make_unet() -> Any:
    """Return the UNet, without LoRA."""
    programs.enter(PROGRAM)
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=CROSS[0],
        up_block_types=CROSS[1],
        cross_attention_dim=8,
        norm_num_groups=4,
        attention_head_dim=4,
    )


def make_adapted() -> Any:
    """Return the UNet with LoRA."""
    unet = make_unet()
    unet.requires_grad_(requires_grad=False)
    names = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=names))
    return unet


def train(group: Any, name: str, place: Path, resumed: Path | None = None) -> dict[str, Any]:
    """Train and save in the place, or resume; return losses, and the state at the save."""
    accelerator, lora = Accelerator(cpu=True), name == "lora"
    set_seed(0)
    unet = make_adapted() if lora else make_unet()
    average = _register_hooks(accelerator, unet, lora=lora)
    trained = [each for each in unet.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    length = 10 * accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(optimizer, length // 5, length)
    model, optimizer, scheduler = accelerator.prepare(unet, optimizer, scheduler)
    if resumed:
        accelerator.load_state(str(resumed))
    found: dict[str, Any] = {"losses": []}
    for step in range(STEPS if resumed else 0, 2 * STEPS):
        if step == STEPS and not resumed:
            accelerator.save_state(str(place))
        if step == STEPS:
            names = {each: name for name, each in unet.named_parameters()}
            states = optimizer.optimizer.state.items()
            found["weights"] = {n: p.tolist() for p, n in names.items() if p.requires_grad}
            found["moments"] = {names[p]: state["exp_avg"].tolist() for p, state in states}
            found["average"] = [each.tolist() for each in average.shadow_params]
            found["rate"] = scheduler.get_last_lr()
        chance = torch.Generator().manual_seed(step)
        image = torch.randn(BATCH, 4, 8, 8, generator=chance)
        text = torch.randn(BATCH, 3, 8, generator=chance)
        share = BATCH // group.world
        own = slice(group.rank * share, (group.rank + 1) * share)
        loss = (model(image[own], 1, text[own]).sample - image[own]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.step(trained)
        found["losses"].append(ranks.mean_over_ranks(loss, group.world))
    return found


def _register_hooks(accelerator: Any, unet: Any, *, lora: bool) -> Any:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
    from diffusers.training_utils import EMAModel
    from diffusers.utils import convert_state_dict_to_diffusers, convert_unet_state_dict_to_peft

    trained = [each for each in unet.parameters() if each.requires_grad]
    average = EMAModel(trained, model_cls=UNet2DConditionModel, model_config=unet.config)

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        if not accelerator.is_main_process:
            return
        for model in models:
            own = accelerator.unwrap_model(model)
            if lora:
                layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(own))
                StableDiffusionPipeline.save_lora_weights(directory, unet_lora_layers=layers)
            else:
                average.save_pretrained(f"{directory}/unet_ema")
                own.save_pretrained(f"{directory}/unet")
            weights.pop()

    def load(models: list[Any], directory: str) -> None:
        model = accelerator.unwrap_model(models.pop())
        if lora:
            state, _ = StableDiffusionLoraLoaderMixin.lora_state_dict(directory)
            state = {name.removeprefix("unet."): each for name, each in state.items()}
            set_peft_model_state_dict(model, convert_unet_state_dict_to_peft(state), "default")
            return
        loaded = EMAModel.from_pretrained(f"{directory}/unet_ema", UNet2DConditionModel)
        average.load_state_dict(loaded.state_dict())
        stored = UNet2DConditionModel.from_pretrained(directory, subfolder="unet")
        model.load_state_dict(stored.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return average
