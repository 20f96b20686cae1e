"""LoRA as ms-swift trains it in Megatron: mcore-bridge's layers, and its functions that save them.

The layers replace Megatron-core's own ones, as they do on an NPU; on a GPU they replace those of
Transformer Engine, under the same names and with the same cuts. What the packages import besides
is not needed here, and absent.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.judges import programs
from tests.judges.megatron_cases import SHARDING, Case
from tests.support.megatron.cpu import add_modules

PROGRAM = "ms-swift"
ENGINE = "megatron.core.extensions.transformer_engine"
OF_ENGINE = (
    *("TEColumnParallelGroupedLinear", "TEGroupedLinear", "TERowParallelGroupedLinear"),
    "TELayerNormColumnParallelLinear",
)


def adapt(model: Any, base: Path, dim: int, alpha: int) -> Any:
    """Fill a model from a checkpoint, and put mcore-bridge's layers around its own."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import RowParallelLinear
    from peft import LoraConfig, inject_adapter_in_model

    group = mpu.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    folder = next(base.glob("iter_*"))
    model.load_state_dict(dist_checkpointing.load(state, str(folder)), strict=False)

    _import_layers()
    layers = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    config = LoraConfig(r=dim, lora_alpha=alpha, target_modules=layers, task_type="CAUSAL_LM")
    init = RowParallelLinear.__init__

    def skip_bias(layer: Any, *sizes: Any, **options: Any) -> None:
        init(layer, *sizes, **options | {"skip_bias_add": True})  # experts of core require it

    with patch.object(RowParallelLinear, "__init__", skip_bias):
        return inject_adapter_in_model(config, model)


def save(run: Any, place: Path, form: str) -> None:
    """Save as ms-swift's trainer does."""
    args = _make_args(run.case, form, run.settings)
    _import_checkpoints().save_mcore_checkpoint(
        args,
        run.chunks,
        run.optimizer,
        run.scheduler,
        iteration=run.step,
        peft_format=True,
        output_dir=str(place),
    )


def load(run: Any, place: Path) -> None:
    """Load an adapter with its optimizer, as ``--mcore_adapter`` does."""
    import torch

    args = _make_args(run.case, run.case.canonical, run.settings)
    args.mcore_adapter = str(place)
    with torch.no_grad():  # as `megatron_files.load`
        run.step = _import_checkpoints().load_mcore_checkpoint(
            args, run.chunks, run.optimizer, run.scheduler, "mcore_adapter"
        )


def _add_package(name: str, **values: Any) -> None:
    module = ModuleType(name)
    module.__path__ = [str(programs.FOLDER.joinpath(PROGRAM, *name.split(".")))]
    module.__dict__.update(values)
    sys.modules.setdefault(name, module)


def _import_layers() -> None:
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from tests.support.megatron.fused import WholeLinear

    class _Linear(WholeLinear):
        def __init__(self, *sizes: Any, is_expert: bool = False, **options: Any) -> None:
            super().__init__(*sizes, **options)
            self.weight.allreduce = (
                not is_expert or options["config"].expert_model_parallel_size == 1
            )

    engine = importlib.import_module(ENGINE)
    for name in OF_ENGINE:
        setattr(engine, name, type(name, (torch.nn.Module,), {}))
    engine.TELinear = _Linear
    engine.TEColumnParallelLinear = ColumnParallelLinear
    engine.TERowParallelLinear = RowParallelLinear
    sys.modules.setdefault("transformer_engine", ModuleType("transformer_engine"))
    device = torch.device("cpu")
    _add_package("mcore_bridge")
    _add_package("mcore_bridge.utils", get_current_device=lambda: device)
    utils = importlib.import_module("mcore_bridge.utils.utils")
    sys.modules["mcore_bridge.utils"].patch_deepcopy = utils.patch_deepcopy
    for name in ("lora", "patcher"):
        module = importlib.import_module(f"mcore_bridge.tuners.{name}")
        module.is_torch_npu_available = lambda: True
    sys.modules["mcore_bridge.tuners.lora"]._use_legacy_npu_local_linear = lambda: False
    del sys.modules["transformer_engine"]


def _import_checkpoints() -> ModuleType:
    import logging

    import torch.distributed as dist
    from megatron.core.utils import unwrap_model

    bridge = sys.modules["mcore_bridge"]
    bridge.unwrap_model = unwrap_model
    bridge.set_random_seed = bridge.split_cp_inputs = None
    logger = {"get_logger": lambda: logging.getLogger("swift")}
    absent = {"json_repair": {}, "modelscope.utils.logger": logger, "pandas": {"DataFrame": None}}
    add_modules(absent)
    for name in ("swift", "swift.megatron", "swift.megatron.utils"):
        _add_package(name)
    _add_package(
        "swift.utils",
        **logger,
        is_master=lambda: dist.get_rank() == 0,
        init_process_group=None,
        set_device=None,
    )
    utils = importlib.import_module("swift.utils.utils")
    sys.modules["swift.utils"].check_json_format = utils.check_json_format
    return importlib.import_module("swift.megatron.utils.megatron_lm_utils")


def _make_args(case: Case, form: str, settings: dict[str, Any]) -> Namespace:
    """Return the arguments of ms-swift that matter here; they do not describe the model."""
    grid, sharding = case.grid, SHARDING[form]
    return Namespace(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=grid.dp,
        world_size=grid.world,
        use_distributed_optimizer=case.distributed,
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        tuner_type="lora",
        lora_dropout=0.0,
        lora_bias="none",
        use_rslora=False,
        target_modules=["all-linear"],
        modules_to_save=[],
        dist_ckpt_save_pre_mcore_014=sharding == "fully_sharded_model_space",
        dist_ckpt_optim_fully_reshardable=sharding == "fully_reshardable",
        distrib_optim_fully_reshardable_mem_efficient=False,
        data_parallel_random_init=False,
        use_megatron_fsdp=False,
        async_save=False,
        finetune=False,
        no_save_optim=False,
        no_save_rng=False,
        no_load_optim=False,
        no_load_rng=True,
        micro_batch_size=1,
        global_batch_size=4,
        **settings,
    )
