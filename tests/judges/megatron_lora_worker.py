"""Ranks that train LoRA adapters of Megatron-Bridge on a Megatron-core model, and save them.

What Megatron-Bridge's ``save_checkpoint`` and ``load_checkpoint`` do around its own modules is here
(0.3.1 and 0.6.2 ``training/checkpointing.py``, ``apply_peft_adapter_filter_to_state_dict``): its
package imports Transformer Engine, ``megatron.bridge.peft`` alone does not.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.judges import megatron_swift, megatron_worker, programs, ranks
from tests.judges.megatron_cases import STEPS, Case, Grid

PROGRAM = "megatron-bridge"
FORM = "torch_dist_fully_reshardable"
DIM, ALPHA = 4, 12
SWIFT = megatron_swift.PROGRAM
FUSED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
APART = ["linear_q", "linear_k", "linear_v", "linear_fc1_up", "linear_fc1_gate"]


def _make_peft(kind: str) -> Any:
    """Return Megatron-Bridge's ``LoRA`` or ``CanonicalLoRA``."""
    from torch.nn import Module

    package = ModuleType("megatron.bridge")
    package.__path__ = [str(programs.FOLDER / PROGRAM / "megatron" / "bridge")]
    sys.modules.setdefault("megatron.bridge", package)
    engine = ModuleType("transformer_engine.pytorch")
    engine.Linear = engine.LayerNormLinear = type("Linear", (Module,), {})
    engine.ops = SimpleNamespace(Sequential=Module)
    names = {"transformer_engine": ModuleType("transformer_engine"), engine.__name__: engine}
    names["transformer_engine"].pytorch = engine
    sys.modules |= names  # for their annotations alone
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    utils.HAVE_TE = False  # core 0.16.1 has these names without the package
    for name in names:
        del sys.modules[name]
    chosen, targets = (LoRA, FUSED) if kind == "LoRA" else (CanonicalLoRA, APART)
    return chosen(target_modules=targets, dim=DIM, alpha=ALPHA)


def work(job: ranks.Job, rank: int) -> None:
    """Train an adapter of a base and save it, or load it; then load it all on one rank."""
    import torch
    import torch.distributed as dist

    case: Case = job.told["table"][job.case]
    base, kind = job.told["base"], job.told["kind"]
    ranks.join_group(job, rank)
    run, peft = _begin(case, base, kind)
    trained = []
    if case.start is None:
        trained = run.train(STEPS)
        for form in dict.fromkeys((*case.forms, case.canonical)):
            _save(run, peft, job.out / form, form)
    else:
        _load(run, peft, Path(case.start))
        _save(run, peft, job.out / case.canonical, case.canonical)
    told = {"losses": run.evaluate(), "trained": trained, "later": run.train(2)}
    dist.barrier()
    megatron_worker._leave()
    if rank == 0:
        torch.save(told | _on_one_rank(job, case), job.out / "expected.pt")


def _on_one_rank(job: ranks.Job, case: Case) -> dict[str, Any]:
    import dataclasses

    import torch.distributed as dist

    from tests.judges import megatron_state

    file = job.out / ".alone"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    alone = dataclasses.replace(
        case, grid=Grid(), padded=case.padded_vocabulary, expert_part=case.grid.ep > 1
    )
    run, peft = _begin(alone, job.told["base"], job.told["kind"])
    _load(run, peft, job.out / case.canonical)
    return megatron_state.whole(run)


def _begin(case: Case, base: str, kind: str) -> Any:
    from tests.judges import megatron_files as files
    from tests.judges import megatron_models as models
    from tests.judges.megatron_run import Run

    models.lay_grid(case.grid)
    if SWIFT in kind:
        peft = partial(megatron_swift.adapt, base=Path(base), dim=DIM, alpha=ALPHA)
    else:
        peft = _make_peft(kind)
    build = models._gpt
    models._gpt = lambda *args: peft(build(*args))
    run = Run(case)
    run.settings = {"lora_rank": DIM, "lora_alpha": ALPHA} if SWIFT in kind else {}
    models._gpt = build
    if run.settings:
        return run, peft
    peft.set_params_to_save(run.models())
    metadata = files._metadata(run, "fully_reshardable")
    states = [
        {k: v for k, v in m.sharded_state_dict(metadata=metadata).items() if ".adapter." not in k}
        for m in run.models()
    ]
    folder = next(Path(base).glob("iter_*"))
    for chunk, state in zip(run.models(), states, strict=True):
        chunk.load_state_dict(files.dist_checkpointing.load(state, str(folder)), strict=False)
    return run, peft


def _list_state(run: Any, peft: Any, metadata: Any, *, is_loading: bool = False) -> dict[str, Any]:
    from tests.judges import megatron_files as files

    state = files._state(run, None, metadata, is_loading=is_loading)
    del state["args"]
    for name in [name for name in state if name.startswith("model")]:
        kept = filter(peft.adapter_key_filter, state[name])
        state[name] = {key: state[name][key] for key in kept if "_extra_state" not in key}
    return state


def _save(run: Any, peft: Any, place: Path, form: str) -> None:
    import torch.distributed as dist

    from tests.judges import megatron_files as files
    from tests.judges.megatron_cases import SHARDING
    from tests.support.megatron.core import TRACKER

    if run.settings:
        megatron_swift.save(run, place, form)
        return
    folder = place / f"iter_{run.step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = files._metadata(run, SHARDING[form])
    kept = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    state = _list_state(run, peft, metadata)
    strategy = files.FullyParallelSaveStrategyWrapper(
        files.TorchDistSaveShardedStrategy("torch_dist", 1), metadata["dp_cp_group"]
    )
    files.dist_checkpointing.save(state, str(folder), strategy, content_metadata=kept)
    if dist.get_rank() == 0:
        (place / TRACKER).write_text(str(run.step))
        (folder / "run_config.yaml").write_text(_describe(run, peft))
    dist.barrier()


def _load(run: Any, peft: Any, place: Path) -> None:
    import torch
    from megatron.core import parallel_state as mpu

    from tests.judges import megatron_files as files

    if run.settings:
        megatron_swift.load(run, place)
        return
    folder = str(next(place.glob("iter_*")))
    common = files.dist_checkpointing.load_common_state_dict(folder)
    metadata = files.dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    wanted = _list_state(run, peft, metadata, is_loading=True)
    strategy = files.get_default_load_sharded_strategy(folder)
    with torch.no_grad():
        state = files.dist_checkpointing.load(wanted, folder, strategy)
        for number, chunk in enumerate(run.models()):
            name = "model" if len(run.chunks) == 1 else f"model{number}"
            chunk.load_state_dict(state[name], strict=False)
        run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["opt_param_scheduler"])
    run.step = state["iteration"]


def _describe(run: Any, peft: Any) -> str:
    """Return the settings of ``run_config.yaml`` that Megatron-Bridge's ``to_dict`` writes."""
    import yaml

    from tests.judges import megatron_files as files

    args = vars(files.namespace(run.case, "torch_dist"))
    model = {
        name: args[name]
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *("kv_channels", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("vocab_size", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization"),
            *("position_embedding_type", "rotary_base", "rotary_percent", "seq_length"),
            *("layernorm_epsilon", "make_vocab_size_divisible_by", "bf16", "sequence_parallel"),
        )
    }
    model |= {
        "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider",
        "num_query_groups": run.config.num_query_groups,
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "share_embeddings_and_output_weights": False,
        "should_pad_vocab": True,
        "transformer_layer_spec": {
            "_target_": "megatron.bridge.models.gpt_provider.local_layer_spec"
        },
    }
    adapted = {
        "_target_": f"{type(peft).__module__}.{type(peft).__qualname__}",
        **{name: getattr(peft, name) for name in ("target_modules", "exclude_modules")},
        **{name: getattr(peft, name) for name in ("dim", "alpha", "dropout", "dropout_position")},
    }
    ddp = {"use_distributed_optimizer": run.case.distributed, "grad_reduce_in_fp32": False}
    optimizer = {"optimizer": "adam", "lr": args["lr"], "weight_decay": args["weight_decay"]}
    train = {"micro_batch_size": args["micro_batch_size"], "global_batch_size": 4}
    root = {"model": model, "peft": adapted, "ddp": ddp, "optimizer": optimizer, "train": train}
    return yaml.safe_dump(root)


if __name__ == "__main__":
    ranks.serve(work, megatron_worker.preload)
