"""The table of PyTorch runs: one row is one checkpoint that real PyTorch is asked to write."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.judges.device import IS_GPU

MODELS = "tests.judges.torch_models"
LLAMA_LAYER = "LlamaDecoderLayer"


@dataclass(frozen=True)
class Case:
    """One run, and what a user would tell reshard about its files.

    Args:
        weights: the form of the model's state dict: full, sharded, local, raw (``state_dict()``).
        moments: the form of the optimizer's; None saves no optimizer.
        files: how both go into files, a function of torch_worker.
        setup: how it was trained, see torch_worker.Setup.
        knobs: of the writer.
        model: what ``--model`` must be when the files alone cannot tell; ``wrap`` as well.
        source: the path below ``ckpt`` that a user would give; ``key`` where in its file.
        expect: "read", or "refused: <why>", or "cannot be written: <PyTorch's error>".
    """

    name: str
    world: int
    what: str
    engine: str
    weights: str | None
    moments: str | None
    files: str
    build: str = "menagerie"
    setup: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    wrap: str | None = None
    source: str = ""
    key: str | None = None
    expect: str = "read"


def _case(  # noqa: PLR0913 - a row of the table has as many columns
    name: str,
    world: int,
    engine: str,
    weights: str | None,
    moments: str | None,
    files: str,
    what: str,
    *,
    build: str = "menagerie",
    told: bool = False,
    wrap: str | None = None,
    source: str = "",
    key: str | None = None,
    expect: str = "read",
    knobs: dict[str, Any] | None = None,
    **setup: Any,
) -> Case:
    model = f"{MODELS}:{build}" if told else None
    return Case(
        name,
        world,
        what,
        engine,
        weights,
        moments,
        files,
        build,
        setup,
        knobs or {},
        model,
        wrap,
        source,
        key,
        expect,
    )


def _fsdp1_full() -> list[Case]:
    row = ("fsdp1", "full", "full")
    decay = {"orig": True, "groups": "decay"}
    return [
        _case("fsdp1_full", 2, *row, "pair", "flat parameters, rank 0 writes model.pt, optim.pt"),
        _case("fsdp1_full_ws4", 4, *row, "pair", "the same at 4 ranks"),
        _case("fsdp1_full_one_file", 2, *row, "one", "{model, optimizer, epoch}"),
        _case("fsdp1_full_orig", 2, *row, "pair", "use_orig_params, two groups", **decay),
        _case("fsdp1_full_tied", 2, *row, "pair", "tied", build="menagerie_tied"),
        _case(
            "fsdp1_full_orig_frozen_ws4",
            4,
            *row,
            "one",
            "a frozen parameter, which the optimizer lists and has no state of",
            build="menagerie_frozen",
            orig=True,
        ),
        _case("fsdp1_full_grad_op", 2, *row, "pair", "ZeRO-2", strategy="SHARD_GRAD_OP"),
        _case("fsdp1_full_no_shard", 2, *row, "pair", "NO_SHARD", strategy="NO_SHARD"),
        _case("fsdp1_full_hybrid_ws4", 4, *row, "pair", "2 x 2", strategy="HYBRID_SHARD"),
        _case("fsdp1_full_nested", 2, *row, "pair", "attention inside layer", policy="nested"),
        _case("fsdp1_full_size_wrap", 2, *row, "pair", "wrapped by size", policy="size"),
        _case("fsdp1_full_unwrapped", 2, *row, "pair", "one flat parameter", policy="none"),
        _case("fsdp1_full_mixed", 2, *row, "pair", "MixedPrecision(bf16): fp32 files", mixed=True),
        _case("fsdp1_full_bf16", 2, *row, "pair", "a bf16 model", build="menagerie_bf16"),
        _case("fsdp1_full_mlp_ws4", 4, *row, "one", "no Llama", build="mlp", policy="nested"),
        _case(
            "fsdp1_full_unused",
            2,
            *row,
            "pair",
            "a parameter without gradient has zero state all the same",
            build="menagerie_unused",
        ),
        _case("fsdp1_full_sgd", 2, *row, "pair", "SGD with momentum", optimizer="sgd"),
        _case("fsdp1_full_model_only", 2, "fsdp1", "full", None, "pair", "no optimizer"),
        _case(
            "fsdp1_full_flat_groups",
            2,
            *row,
            "pair",
            "two groups of whole flat parameters",
            groups="units",
        ),
    ]


def _fsdp1_sharded() -> list[Case]:
    row = ("fsdp1", "sharded", "sharded")
    mesh = {"mesh": True}
    decay = {"orig": True, "groups": "decay"}
    cases = [
        _case(f"fsdp1_sharded_{kind}{suffix}", world, *row, files, what, **setup)
        for kind, setup in (("shardedtensor", {}), ("dtensor", mesh))
        for suffix, world, files, what in (
            ("", 2, "rank_pair", f"{kind} in model_rank<r>.pt, optim_rank<r>.pt"),
            ("_ws4", 4, "rank_pair", f"{kind}; rank 3 has no row of `small`"),
            ("_one_file", 2, "rank_one", f"{kind}, {{model, optimizer}} in rank<r>.pt"),
            ("_dcp", 2, "dcp", f"{kind}, dcp.save of {{model, optim}}"),
            ("_dcp_ws4", 4, "dcp", f"{kind}, dcp.save of {{model, optim}}"),
        )
    ]
    raw = ("fsdp1", "sharded", "raw")
    ignored: dict[str, Any] = {"ignored": True, "told": True, "wrap": LLAMA_LAYER}
    hybrid = {"strategy": "HYBRID_SHARD"}
    zero2 = {"strategy": "_HYBRID_SHARD_ZERO2"}
    return [
        *cases,
        _case("fsdp1_sharded_orig", 2, *row, "rank_pair", "use_orig_params, two groups", **decay),
        _case("fsdp1_sharded_orig_mesh_ws4", 4, *row, "rank_pair", "the same", **decay, **mesh),
        _case("fsdp1_sharded_hybrid_ws4", 4, *row, "rank_pair", "two replicas", **hybrid),
        _case("fsdp1_sharded_hybrid_mesh_ws4", 4, *row, "rank_pair", "DTensor", **hybrid, **mesh),
        _case("fsdp1_sharded_hybrid_dcp_ws4", 4, *row, "dcp", "two replicas", **hybrid),
        _case("fsdp1_sharded_hybrid_zero2_mesh_dcp_ws4", 4, *row, "dcp", "", **zero2, **mesh),
        _case("fsdp1_sharded_tied", 2, *row, "rank_pair", "tied", build="menagerie_tied"),
        _case(
            "fsdp1_sharded_tied_frozen_dcp",
            2,
            *row,
            "dcp",
            "both copies of the tied weight in the files",
            build="menagerie_tied_frozen",
            orig=True,
        ),
        _case("fsdp1_sharded_bf16", 2, *row, "rank_one", "bf16", build="menagerie_bf16"),
        _case("fsdp1_sharded_mixed_dcp", 2, *row, "dcp", "MixedPrecision", mixed=True),
        _case("fsdp1_sharded_no_shard", 2, *row, "rank_pair", "whole", strategy="NO_SHARD"),
        _case("fsdp1_sharded_mlp_ws4", 4, *row, "rank_pair", "", build="mlp", policy="nested"),
        _case(
            "fsdp1_sharded_ignored_ws4", 4, *raw, "rank_pair", "raw optimizer", **mesh, **ignored
        ),
        _case("fsdp1_sharded_model_only", 4, "fsdp1", "sharded", None, "rank_pair", "no optimizer"),
        _case(
            "fsdp1_dcp_get_state_dict",
            2,
            "fsdp1",
            "gets",
            "gets",
            "dcp",
            "torch.distributed.checkpoint.state_dict.get_state_dict",
        ),
        _case("fsdp1_dcp_flattened", 2, "fsdp1", "gets", "flattened", "dcp", "optimizer flattened"),
    ]


def _fsdp1_local() -> list[Case]:
    row = ("fsdp1", "local", "raw")
    layer: dict[str, Any] = {"told": True, "wrap": LLAMA_LAYER}
    nested: dict[str, Any] = {
        "told": True,
        "wrap": f"{LLAMA_LAYER},LlamaAttention",
        "policy": "nested",
    }
    none: dict[str, Any] = {"told": True, "policy": "none", "wrap": "none"}
    blocks: dict[str, Any] = {
        "told": True,
        "build": "mlp",
        "policy": "nested",
        "wrap": "Block,Inner",
    }
    sized: dict[str, Any] = {"told": True, "policy": "size", "wrap": "size=3000"}
    orig: dict[str, Any] = {"orig": True}
    decay: dict[str, Any] = {"orig": True, "groups": "decay"}
    tied: dict[str, Any] = {**layer, "build": "menagerie_tied"}
    bf16: dict[str, Any] = {**layer, "build": "menagerie_bf16"}
    pair = "rank_pair"
    return [
        _case("fsdp1_local_flat", 2, *row, pair, "flat parameters, raw optimizer", **layer),
        _case("fsdp1_local_flat_ws4", 4, *row, pair, "the same", **layer),
        _case("fsdp1_local_flat_one_file", 2, *row, "rank_one", "{model, optimizer}", **layer),
        _case("fsdp1_local_flat_nested_ws4", 4, *row, pair, "attention inside layer", **nested),
        _case("fsdp1_local_flat_size_wrap", 2, *row, pair, "units only the keys tell", **sized),
        _case("fsdp1_local_flat_unwrapped_ws4", 4, *row, pair, "one flat parameter", **none),
        _case("fsdp1_local_flat_tied_ws4", 4, *row, pair, "tied", **tied),
        _case("fsdp1_local_flat_bf16", 2, *row, pair, "bf16", **bf16),
        _case("fsdp1_local_flat_mixed", 2, *row, pair, "MixedPrecision", mixed=True, **layer),
        _case("fsdp1_local_flat_grad_op", 2, *row, pair, "", strategy="SHARD_GRAD_OP", **layer),
        _case("fsdp1_local_flat_no_shard", 2, *row, pair, "", strategy="NO_SHARD", **layer),
        _case("fsdp1_local_flat_mlp_ws4", 4, *row, pair, "nested units", **blocks),
        _case(
            "fsdp1_local_flat_frozen_unit",
            2,
            *row,
            pair,
            "a unit without gradients",
            **{**blocks, "build": "mlp_frozen"},
        ),
        _case("fsdp1_local_flat_sgd", 2, *row, pair, "SGD with momentum", optimizer="sgd", **layer),
        _case("fsdp1_local_flat_groups", 2, *row, pair, "groups of units", groups="units", **layer),
        _case("fsdp1_local_flat_named", 2, *row, pair, "param_names", groups="named", **layer),
        _case("fsdp1_local_flat_compiled", 2, *row, "compiled_ranks", "_orig_mod.", **layer),
        _case("fsdp1_local_flat_model_only", 2, "fsdp1", "local", None, pair, "", **layer),
        _case("fsdp1_local_orig", 2, *row, pair, "use_orig_params", **orig, **layer),
        _case("fsdp1_local_orig_named", 2, *row, pair, "", groups="named", **orig, **layer),
        _case("fsdp1_local_orig_ws4", 4, *row, pair, "two groups", **decay, **layer),
        _case(
            "fsdp1_local_orig_adagrad_ws4",
            4,
            *row,
            pair,
            "no update on ranks without elements",
            optimizer="adagrad",
            **orig,
            **layer,
        ),
        _case(
            "fsdp1_local_orig_frozen_ws4",
            4,
            *row,
            pair,
            "a frozen parameter inside the root's flat parameter",
            build="menagerie_frozen",
            **orig,
            **layer,
        ),
        _case(
            "fsdp1_local_orig_tied_frozen",
            2,
            *row,
            pair,
            "",
            build="menagerie_tied_frozen",
            **orig,
            **layer,
        ),
        _case("fsdp1_local_orig_bf16_ws4", 4, *row, pair, "padded to 8", **orig, **bf16),
        _case("fsdp1_local_orig_mixed", 2, *row, pair, "padded to 8", mixed=True, **orig, **layer),
        _case("fsdp1_local_flat_ignored_ws4", 4, *row, pair, "ignored", ignored=True, **layer),
        _case("fsdp1_local_orig_ignored", 2, *row, pair, "", ignored=True, **orig, **layer),
        _case("fsdp1_local_orig_mlp_ws4", 4, *row, pair, "nested units", **orig, **blocks),
        _case(
            "fsdp1_local_optim_sharded_ws4",
            4,
            "fsdp1",
            "local",
            "local",
            pair,
            "FSDP.optim_state_dict under LOCAL: sharded tensors by fqn",
            **layer,
        ),
        _case("fsdp1_local_dcp", 2, "fsdp1", "local", "sharded", "dcp", "flat in DCP", **layer),
        _case(
            "fsdp1_local_orig_dcp",
            2,
            "fsdp1",
            "local",
            "sharded",
            "dcp",
            "one rank's slices",
            expect="refused: DCP saves one rank's slice of each parameter",
            **orig,
            **layer,
        ),
        _case(
            "fsdp1_local_hybrid_ws4",
            4,
            *row,
            pair,
            "two replicas",
            strategy="HYBRID_SHARD",
            **layer,
            expect="cannot be written: ValueError: Global rank 0 does not exist in input process"
            " group: [2, 3]",
        ),
        _case(
            "fsdp1_local_mesh",
            2,
            *row,
            pair,
            "LOCAL with a device mesh",
            mesh=True,
            **layer,
            expect="cannot be written: RuntimeError: Found state_dict_type LOCAL_STATE_DICT."
            " DeviceMesh is not compatible with LOCAL_STATE_DICT.",
        ),
        _case(
            "fsdp1_local_flat_frozen",
            2,
            *row,
            pair,
            "a frozen parameter among others in a flat one",
            build="menagerie_frozen",
            **layer,
            expect="cannot be written: ValueError: Must flatten tensors with uniform"
            " `requires_grad` when `use_orig_params=False`",
        ),
    ]


def _fsdp1_mixed_forms() -> list[Case]:
    """Return the cases of a model in one form and its optimizer in another."""
    layer: dict[str, Any] = {"told": True, "wrap": LLAMA_LAYER}
    return [
        _case(
            "fsdp1_full_optim_raw",
            2,
            "fsdp1",
            "full",
            "raw",
            "full_and_ranks",
            "model.pt whole, optim_rank<r>.pt flat: only the wrapping tells the units",
            **layer,
        ),
        _case(
            "fsdp1_full_optim_raw_orig_ws4",
            4,
            "fsdp1",
            "full",
            "raw",
            "full_and_ranks",
            "the same with use_orig_params: 1-D local slices by index",
            orig=True,
            **layer,
        ),
        _case(
            "fsdp1_full_optim_sharded",
            2,
            "fsdp1",
            "full",
            "sharded",
            "full_and_ranks",
            "model.pt whole, optim_rank<r>.pt by fqn",
        ),
        _case(
            "fsdp1_full_optim_rekeyed",
            2,
            "fsdp1",
            "full",
            "rekeyed",
            "pair",
            "rekey_optim_state_dict to PARAM_ID",
            told=True,
        ),
        _case(
            "fsdp1_full_optim_rekeyed_groups",
            2,
            "fsdp1",
            "full",
            "rekeyed",
            "one",
            "the same, two groups: ids follow named_parameters, not the groups",
            orig=True,
            groups="decay",
            told=True,
        ),
        _case(
            "fsdp1_full_optim_flattened",
            2,
            "fsdp1",
            "full",
            "flattened_full",
            "pair",
            "flatten_optimizer_state_dict: state.<fqn>.exp_avg",
        ),
    ]


def _fsdp2() -> list[Case]:
    row = ("fsdp2", "raw", "raw")
    gets = ("fsdp2", "gets", "gets")
    pair = "rank_pair"
    hsdp = {"grid": "hsdp"}
    tensor = {"grid": "tensor"}
    twin = "menagerie_twin"
    return [
        _case("fsdp2_ranks", 2, *row, pair, "DTensors, raw optimizer by index"),
        _case("fsdp2_ranks_ws4", 4, *row, pair, "rank 3 has no row of `small`"),
        _case("fsdp2_ranks_ws1", 1, *row, pair, "one rank"),
        _case("fsdp2_ranks_one_file", 2, *row, "rank_one", "{model, optimizer}"),
        _case("fsdp2_ranks_tied_ws4", 4, *row, pair, "", build="menagerie_tied"),
        _case("fsdp2_ranks_tied_frozen", 2, *row, pair, "", build="menagerie_tied_frozen"),
        _case("fsdp2_ranks_unused", 2, *row, pair, "no state of it", build="menagerie_unused"),
        _case("fsdp2_ranks_bf16", 2, *row, "rank_one", "", build="menagerie_bf16"),
        _case("fsdp2_ranks_ignored", 2, *row, pair, "two are plain", ignored=True, build=twin),
        _case("fsdp2_ranks_groups", 2, *row, pair, "two groups by index", groups="decay"),
        _case("fsdp2_ranks_named", 2, *row, pair, "param_names", groups="named"),
        _case("fsdp2_ranks_named_groups_ws4", 4, *row, pair, "", groups="named_decay"),
        _case("fsdp2_ranks_hsdp_ws4", 4, *row, pair, "(Replicate, Shard)", **hsdp),
        _case("fsdp2_ranks_2d_ws4", 4, *row, pair, "dp x tp, strided shards", **tensor),
        _case("fsdp2_ranks_tp", 2, *row, pair, "tensor parallel only", grid="only_tensor"),
        _case("fsdp2_ranks_columns", 2, *row, pair, "Shard(1)", columns=True),
        _case("fsdp2_ranks_columns_ws4", 4, *row, "rank_one", "Shard(1)", columns=True),
        _case("fsdp2_ranks_nested_ws4", 4, *row, pair, "", build="mlp", policy="nested"),
        _case("fsdp2_ranks_recompute", 2, *row, pair, "wrapped for recomputing", recompute=True),
        _case("fsdp2_ranks_sgd", 2, *row, pair, "SGD with momentum", optimizer="sgd"),
        _case("fsdp2_ranks_gets", 2, *gets, pair, "get_state_dict, by fqn"),
        _case("fsdp2_ranks_model_only_ws4", 4, "fsdp2", "raw", None, pair, ""),
        _case("fsdp2_full", 2, "fsdp2", "gets_full", "gets_full", "pair", "get_state_dict, full"),
        _case("fsdp2_full_ws4", 4, "fsdp2", "gets_full", "gets_full", "one", "", **tensor),
        _case("fsdp2_dcp", 2, *gets, "dcp", "get_state_dict"),
        _case("fsdp2_dcp_ws4", 4, *gets, "dcp", ""),
        _case("fsdp2_dcp_ws1", 1, *gets, "dcp", ""),
        _case("fsdp2_dcp_hsdp_ws4", 4, *gets, "dcp", "", **hsdp),
        _case("fsdp2_dcp_2d_ws4", 4, *gets, "dcp", "", **tensor),
        _case("fsdp2_dcp_tp", 2, *gets, "dcp", "", grid="only_tensor"),
        _case("fsdp2_dcp_columns_ws4", 4, *gets, "dcp", "", columns=True),
        _case("fsdp2_dcp_tied_frozen", 2, *gets, "dcp", "", build="menagerie_tied_frozen"),
        _case("fsdp2_dcp_groups", 2, *gets, "dcp", "two groups", groups="decay"),
        _case("fsdp2_dcp_named", 2, *gets, "dcp", "param_names", groups="named_decay"),
        _case("fsdp2_dcp_unused", 2, *gets, "dcp", "no state of it", build="menagerie_unused"),
        _case("fsdp2_dcp_bf16", 2, *gets, "dcp", "", build="menagerie_bf16"),
        _case("fsdp2_dcp_amsgrad", 2, *gets, "dcp", "a third slot", optimizer="amsgrad"),
        _case("fsdp2_dcp_flattened", 2, "fsdp2", "gets", "flattened", "dcp", "", groups="decay"),
        _case("fsdp2_dcp_raw", 2, *row, "dcp", "optim.state.0.exp_avg"),
        _case("fsdp2_dcp_raw_groups", 2, *row, "dcp", "two groups by index", groups="decay"),
        _case("fsdp2_dcp_raw_twin", 2, *row, "dcp", "a buffer looks like one", build=twin),
        _case("fsdp2_dcp_raw_named", 2, *row, "dcp", "param_names", groups="named_decay"),
    ]


def _dcp() -> list[Case]:
    """Return the cases with the options of torch.distributed.checkpoint."""
    row = ("fsdp2", "gets", "gets", "dcp")
    model = ("fsdp2", "gets", None)
    lowest = {"planner": {"dedup_save_to_lowest_rank": True}}
    objects = {"objects": True, "lr_scheduler": True, "epoch": True}
    sharded = {"save_distributed": True}
    consolidated = {**sharded, "enable_consolidation": True}
    return [
        _case("dcp_async", 2, *row, "async_save", knobs={"async": True}),
        _case("dcp_item_files", 2, *row, "", knobs={"single_file_per_rank": False}),
        _case("dcp_threads", 2, *row, "three files a rank", knobs={"thread_count": 3}),
        _case("dcp_copy_ahead", 2, *row, "", knobs={"per_thread_copy_ahead": 100}),
        _case("dcp_no_collectives", 2, *row, "__<r>.metadata", knobs={"use_collectives": False}),
        _case(
            "dcp_no_collectives_hsdp_ws4",
            4,
            *row,
            "replicas in every rank's metadata",
            grid="hsdp",
            knobs={"use_collectives": False},
        ),
        _case(
            "dcp_no_collectives_item_files",
            2,
            *row,
            "each object in a file of every rank",
            groups="named",
            knobs={"use_collectives": False, "single_file_per_rank": False},
        ),
        _case("dcp_safetensors", 2, *row, "", knobs={"format": "SAFETENSORS"}),
        _case("dcp_aligned", 2, "fsdp2", "gets", "gets", "aligned_dcp", "storage_alignment 4096"),
        _case("dcp_lowest_rank_hsdp_ws4", 4, *row, "", grid="hsdp", knobs=lowest),
        _case("dcp_one_process", 1, *row, "no_dist", knobs={"one_process": True}),
        _case(
            "dcp_one_process_of_two",
            2,
            "fsdp2",
            "gets_full",
            "gets_full",
            "dcp",
            "no_dist by rank 0, whole tensors",
            knobs={"one_process": True},
        ),
        _case("dcp_top_level", 2, *model, "dcp", "dcp.save(model)", knobs={"top_level": True}),
        _case("dcp_model_only", 2, *model, "dcp", "{model}"),
        _case("dcp_app", 2, *row, "a Stateful: app.model, app.optim", knobs={"app": True}),
        _case("dcp_objects", 2, *row, "scheduler, numpy, random state", knobs=objects),
        _case("dcp_two_directories", 2, "fsdp2", "gets", "gets", "two_dcp", "model/, optim/"),
        _case("dcp_odd_tensors", 2, "plain", "raw", None, "odd_tensors", "strides, dtypes"),
        _case(
            "dcp_colliding",
            1,
            "plain",
            "raw",
            None,
            "colliding",
            "{'a.b': t, 'a': {'b': t}}",
            expect="cannot be written: ValueError: duplicated flatten key model.a.b",
        ),
        _case("hf_storage_sharded", 2, *model, "hugging_face", "", knobs=sharded),
        _case("hf_storage_sharded_ws4", 4, *model, "hugging_face", "", knobs=sharded),
        _case("hf_storage_whole", 1, *model, "hugging_face", ""),
        _case(
            "hf_storage_consolidated",
            2,
            *model,
            "hugging_face",
            "shards, and the whole from them; no integers, see below",
            build="llama",
            knobs=consolidated,
        ),
        _case(
            "hf_storage_consolidated_later",
            2,
            *model,
            "hugging_face_later",
            "consolidate_safetensors_files",
            build="llama",
            knobs=sharded,
        ),
        _case(
            "hf_storage_consolidated_integers",
            2,
            *model,
            "hugging_face",
            "the int64 buffer",
            knobs=consolidated,
            expect="cannot be written: TypeError: torch.finfo() requires a floating point input"
            " type. Use torch.iinfo to handle 'torch.finfo'",
        ),
        _case(
            "hf_storage_tied",
            2,
            *model,
            "hugging_face",
            "tied weights",
            build="llama_tied",
            knobs=sharded,
            expect="cannot be written: Some tensors share memory, this will lead to duplicate"
            " memory on disk and potential differences when loading them again",
        ),
    ]


def _cuda() -> list[Case]:
    """Return cases whose files name GPUs, with the fused AdamW that is usual there."""
    gpu: dict[str, Any] = {"cuda": True, "optimizer": "fused"}
    pair = "rank_pair"
    return [
        _case("cuda_plain", 1, "plain", "raw", "raw", "one", "cuda:0", **gpu),
        _case("cuda_plain_legacy", 1, "plain", "raw", "raw", "legacy", "cuda:0", **gpu),
        _case(
            "cuda_fsdp1_local",
            2,
            "fsdp1",
            "local",
            "raw",
            pair,
            "shards placed on rank:<r>/cuda:<r>",
            told=True,
            wrap=LLAMA_LAYER,
            **gpu,
        ),
        _case("cuda_fsdp1_sharded", 2, "fsdp1", "sharded", "sharded", pair, "the same", **gpu),
        _case("cuda_fsdp2_ranks_ws4", 4, "fsdp2", "raw", "raw", pair, "a cuda mesh", **gpu),
        _case(
            "cuda_fsdp2_ranks_2d_ws4",
            4,
            "fsdp2",
            "raw",
            None,
            pair,
            "dp x tp on cuda meshes; no fused AdamW takes DTensors and plain tensors in one step",
            grid="tensor",
            cuda=True,
        ),
    ]


def _plain() -> list[Case]:
    row = ("plain", "raw", "raw")
    frozen: dict[str, Any] = {"build": "menagerie_frozen", "told": True}
    return [
        _case("plain_tagged", 1, *row, "tagged", "{state_dict, optimizer, epoch}"),
        _case("plain_tutorial", 1, *row, "model_state_dict", "{model_state_dict, ...}"),
        _case("plain_pair", 1, *row, "pair", "model.pt, optim.pt"),
        _case("plain_tied", 1, *row, "one", "both names, one storage", build="menagerie_tied"),
        _case("plain_frozen", 1, *row, "one", "", build="menagerie_tied_frozen", told=True),
        _case("plain_unused", 1, *row, "one", "", build="menagerie_unused", told=True),
        _case("plain_groups", 1, *row, "one", "two groups by index, no names", groups="decay"),
        _case("plain_named", 1, *row, "one", "param_names", groups="named_decay"),
        _case("plain_sgd", 1, *row, "tagged", "", optimizer="sgd"),
        _case("plain_nadam", 1, *row, "one", "a 0-d slot, mu_product", optimizer="nadam"),
        _case("plain_adafactor", 1, *row, "one", "factored slots", optimizer="adafactor"),
        _case("plain_bf16", 1, *row, "tagged", "", build="menagerie_bf16"),
        _case(
            "plain_channels_last",
            1,
            "channels_last",
            "raw",
            "raw",
            "one",
            "convolutions stored in memory order, a 0-d parameter",
            build="convolutions",
        ),
        _case("plain_legacy", 1, *row, "legacy", "before the zip container"),
        _case("plain_aligned", 1, *row, "aligned", "storage_alignment 4096"),
        _case("plain_ddp", 2, "ddp", "raw", "raw", "one", "module."),
        _case("plain_ddp_tied", 2, "ddp", "raw", "raw", "tagged", "", build="menagerie_tied"),
        _case("plain_ddp_frozen", 2, "ddp", "raw", "raw", "one", "", **frozen),
        _case("plain_compiled", 1, *row, "compiled", "_orig_mod."),
        _case("plain_compiled_frozen", 1, *row, "compiled", "", **frozen),
        _case("plain_compiled_layers", 1, *row, "compiled_layers", "_orig_mod. inside names"),
        _case("plain_parameters", 1, *row, "parameters", "Parameters that require grad"),
        _case("plain_flattened", 1, "plain", "gets", "flattened", "one", "", groups="decay"),
        _case("plain_index", 1, "plain", "raw", None, "index", "pytorch_model.bin.index.json"),
        _case(
            "plain_actor_critic",
            1,
            *row,
            "several",
            "two models and their optimizers",
            key="actor",
            knobs={"keys": ("actor", "critic", "actor_optimizer", "critic_optimizer")},
        ),
        _case(
            "plain_gan",
            1,
            *row,
            "several",
            "two models and their optimizers",
            key="generator",
            knobs={"keys": ("generator", "discriminator", "optimizer_g", "optimizer_d")},
        ),
        _case("plain_ema", 1, *row, "averaged", "{model, ema, optimizer}", key="model"),
        _case(
            "plain_module",
            1,
            "plain",
            "raw",
            None,
            "module",
            "torch.save(model)",
            expect="refused: a pickled module is code, not a state dict",
        ),
    ]


CASES = {
    case.name: case
    for cases in (
        _fsdp1_full(),
        _fsdp1_sharded(),
        _fsdp1_local(),
        _fsdp1_mixed_forms(),
        _fsdp2(),
        _dcp(),
        _cuda(),
        _plain(),
    )
    for case in cases
}
if IS_GPU:  # see tests.judges.device
    CASES = {
        name: replace(case, world=1) if case.engine == "fsdp2" else case
        for name, case in CASES.items()
        if case.engine != "fsdp2" or case.setup.get("grid", "flat") == "flat"
    }
