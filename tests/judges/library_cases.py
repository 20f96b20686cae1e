"""The table of library runs: one row is one checkpoint that a real library is asked to write."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.judges.device import IS_GPU

MODELS = "tests.judges.library_models"
IMPORTS: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate", "accelerate.utils.fsdp_utils"),
    "trainer": ("transformers.trainer", "accelerate"),
    "peft": ("peft", "transformers.trainer"),
    "lightning": ("lightning", "lightning.pytorch", "lightning.fabric"),
    "verl": ("tests.judges.library_verl",),
    "torchtitan": ("tests.judges.library_torchtitan",),
    "fairscale": ("fairscale.nn.data_parallel", "fairscale.optim.oss"),
}
"""What the worker imports for a library before it forks; a library that fails here is not made."""


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        source: what a user gives, below ``ckpt``.
        also: other paths that mean the same state.
        factory: the model's function in ``library_models``.
        model: for ``--model``: whatever the files alone cannot tell; None if they can.
        wrap: for ``--wrap``.
        slots: whether the files, with ``model``, tell whose an optimizer state is.
        expect: ``read``, ``adapter`` (by `test_adapters` alone), ``refused``, or ``cannot: `` and
            why the library does not write it here.
        kept: whether a copy lies in ``tests/data``, for machines without the library.
        how: what the maker is told.
    """

    name: str
    library: str
    what: str
    world: int = 2
    factory: str = "net"
    source: str = "."
    also: tuple[str, ...] = ()
    model: str | None = None
    wrap: str | None = None
    slots: bool = True
    kept: bool = False
    expect: str = "read"
    group: bool = True
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def writable(self) -> bool:
        """Return whether the library can write the case on this machine."""
        return not self.expect.startswith("cannot: ")


def _named(factory: str) -> str:
    return f"{MODELS}:{factory}"


def _accelerate() -> list[Case]:
    """Return the cases of ``Accelerator.save_state``."""
    layers = "LlamaDecoderLayer"

    def fsdp(name: str, what: str, **kwargs: Any) -> Case:
        how = {"kind": "fsdp", "version": 1, "orig": True, **kwargs.pop("how")}
        return Case(name, "accelerate", what, how=how, **kwargs)

    return [
        fsdp("acc_fsdp1_sharded", "FSDP 1 SHARDED: DCP", how={"type": "SHARDED"}),
        fsdp(
            "acc_fsdp1_sharded_flat",
            "the same without original parameters, tied",
            how={"type": "SHARDED", "orig": False},
            factory="net_tied",
        ),
        fsdp(
            "acc_fsdp1_sharded_ranks",
            "save_fsdp_model(use_dcp=False): ShardedTensors a rank",
            how={"type": "SHARDED", "dcp": False},
        ),
        fsdp(
            "acc_fsdp1_local_flat",
            "FSDP 1 LOCAL: flat shards, optimizer as DCP",
            how={"type": "LOCAL", "orig": False},
            model=_named("net"),
            wrap=layers,
        ),
        fsdp(
            "acc_fsdp1_local_flat_alone",
            "the same, to be read by the optimizer's shapes without a model",
            how={"type": "LOCAL", "orig": False},
        ),
        fsdp(
            "acc_fsdp1_local_flat_tied_ws4",
            "the same, tied, at 4 ranks",
            world=4,
            how={"type": "LOCAL", "orig": False},
            factory="net_tied",
            model=_named("net_tied"),
            wrap=layers,
        ),
        fsdp(
            "acc_fsdp1_local_orig",
            "FSDP 1 LOCAL with original parameters, one of them frozen",
            how={"type": "LOCAL"},
            factory="net_frozen",
            model=_named("net_frozen"),
            wrap=layers,
        ),
        fsdp(
            "acc_fsdp1_full", "FSDP 1 FULL", how={"type": "FULL", "orig": False}, factory="net_tied"
        ),
        fsdp(
            "acc_fsdp1_full_frozen",
            "FSDP 1 FULL with original parameters, one of them frozen",
            how={"type": "FULL"},
            factory="net_frozen",
        ),
        fsdp(
            "acc_fsdp2_sharded",
            "FSDP 2 SHARDED: DCP, and a part of the model called module",
            how={"type": "SHARDED", "version": 2},
            factory="net_enclosed",
        ),
        fsdp(
            "acc_fsdp2_sharded_tied_ws4",
            "FSDP 2 SHARDED at 4 ranks",
            world=4,
            how={"type": "SHARDED", "version": 2},
            factory="net_tied",
        ),
        fsdp(
            "acc_fsdp2_sharded_ranks",
            "use_dcp=False: DTensors a rank",
            how={"type": "SHARDED", "version": 2, "dcp": False},
            factory="net_frozen",
        ),
        fsdp(
            "acc_fsdp2_full",
            "FSDP 2 FULL",
            how={"type": "FULL", "version": 2},
            factory="net_frozen",
        ),
        fsdp(
            "acc_fsdp1_two_models",
            "two models and two optimizers, each in DCP",
            how={"type": "SHARDED", "two": True},
            expect="refused",
        ),
        fsdp(
            "acc_fsdp2_two_models",
            "the same under FSDP 2",
            how={"type": "SHARDED", "version": 2, "two": True},
            expect="refused",
        ),
        fsdp(
            "acc_fsdp2_local",
            "FSDP 2 has no flat shards",
            how={"type": "LOCAL", "version": 2},
            expect="cannot: ValueError: FSDP2 does not support LOCAL_STATE_DICT. Please set "
            "`fsdp_state_dict_type` to `SHARDED_STATE_DICT` or `FULL_STATE_DICT`.",
        ),
        Case(
            "acc_ddp",
            "accelerate",
            "MULTI_CPU: model.safetensors with a part called module, optimizer.bin by index",
            how={"kind": "ddp"},
            factory="net_enclosed",
            model=_named("net_enclosed"),
        ),
        Case(
            "acc_ddp_bin",
            "accelerate",
            "the same with safe_serialization=False",
            how={"kind": "ddp", "safe": False},
            factory="net_tied",
            model=_named("net_tied"),
        ),
        Case(
            "acc_single",
            "accelerate",
            "one process, a gradient scaler's state beside it",
            world=1,
            group=False,
            how={"kind": "single", "scaler": True},
            factory="net_frozen",
            model=_named("net_frozen"),
        ),
        Case(
            "acc_automatic",
            "accelerate",
            "automatic names: checkpoints/checkpoint_0, checkpoint_1",
            world=1,
            group=False,
            source="checkpoints/checkpoint_1",
            also=("checkpoints", "."),
            how={"kind": "single", "automatic": True},
            model=_named("net"),
        ),
        Case(
            "acc_two_models",
            "accelerate",
            "two models and two optimizers; neither is the checkpoint's",
            world=1,
            group=False,
            expect="refused",
            how={"kind": "single", "two": True},
            model=_named("net"),
        ),
    ]


def _trainer() -> list[Case]:
    """Return the cases of the transformers Trainer's ``checkpoint-N``."""

    def case(name: str, what: str, **kwargs: Any) -> Case:
        kwargs = {"factory": "llama", "source": "checkpoint-4", **kwargs}
        return Case(name, "trainer", what, **kwargs)

    def fsdp(version: int, kind: str) -> dict[str, Any]:
        return {"fsdp": {"version": version, "state_dict_type": f"{kind}_STATE_DICT"}}

    alone: dict[str, Any] = {"world": 1, "group": False}
    return [
        case("trainer_single", "decay and no-decay groups, two checkpoints", also=(".",), **alone),
        case("trainer_tied", "one embedding under two names", factory="llama_tied", **alone),
        case("trainer_bf16", "a bfloat16 model", factory="llama_bf16", **alone),
        case("trainer_ddp", "DDP: rng_state_0, rng_state_1"),
        case("trainer_fsdp1_sharded", "no config.json", how=fsdp(1, "SHARDED")),
        case("trainer_fsdp1_full", "everything twice", how=fsdp(1, "FULL"), factory="llama_tied"),
        case("trainer_fsdp2_sharded", "no config.json", how=fsdp(2, "SHARDED")),
        case("trainer_fsdp2_full", "everything twice", how=fsdp(2, "FULL"), factory="llama_tied"),
    ]


def _peft() -> list[Case]:
    """Return the cases of PEFT, whose checkpoints have adapters but not the base model."""
    return [
        Case(
            "peft_lora",
            "peft",
            "Trainer over a LoRA model: adapter_model.safetensors, optimizer.pt by index",
            world=1,
            group=False,
            source="checkpoint-4",
            factory="llama",
            slots=False,
            how={"kind": "single"},
        ),
        Case(
            "peft_zero3",
            "peft",
            "Trainer over a DoRA model and ZeRO 3; an adapter without values beside it",
            factory="llama",
            source="checkpoint-2",
            expect="adapter",
            how={"kind": "zero3"},
        ),
        Case(
            "peft_fsdp2",
            "peft",
            "save_state of two adapters over FSDP 2; one of them alone, as Trainer saves it",
            factory="llama_biased",
            source="whole",
            expect="adapter",
            how={"kind": "fsdp2"},
        ),
    ]


def _lightning() -> list[Case]:
    """Return the cases of Lightning's .ckpt, a file or a directory; names begin with ``model.``."""

    def case(name: str, what: str, **kwargs: Any) -> Case:
        kwargs = {"source": "last.ckpt", "model": "tests.judges.library_lightning:module", **kwargs}
        return Case(name, "lightning", what, **kwargs)

    return [
        case(
            "lit_single",
            "ModelCheckpoint's own file name, early stopping, hyper_parameters",
            world=1,
            group=False,
            source="epoch=0-step=3.ckpt",
            how={"strategy": "auto", "callbacks": True},
        ),
        case("lit_ddp", "DDP: one file, no prefix", how={"strategy": "ddp"}),
        case("lit_fsdp_full", "FSDP 1: one file", how={"strategy": "fsdp", "type": "full"}),
        case(
            "lit_fsdp_sharded",
            "FSDP 1: a directory, DCP and meta.pt, and a part of the model called module",
            how={"strategy": "fsdp", "type": "sharded"},
            factory="net_enclosed",
            model=None,
        ),
        case(
            "lit_fsdp2_full", "FSDP 2: one file", how={"strategy": "model_parallel", "dcp": False}
        ),
        case(
            "lit_fsdp2_sharded",
            "FSDP 2: a directory, DCP and meta.pt",
            how={"strategy": "model_parallel", "dcp": True},
            model=None,
        ),
        case(
            "lit_deepspeed",
            "ZeRO 2: DeepSpeed's directory, the tag is checkpoint",
            how={"strategy": "deepspeed", "stage": 2},
            model=None,
        ),
        case(
            "lit_fabric",
            "Fabric.save: the user's dict in one file",
            world=1,
            group=False,
            how={"fabric": "auto"},
            model=_named("net"),
        ),
        case(
            "lit_fabric_fsdp_full",
            "Fabric.save under FSDP 1: one file",
            how={"fabric": "full"},
            model=_named("net"),
        ),
        case(
            "lit_fabric_fsdp_sharded",
            "Fabric.save under FSDP 1: a directory, DCP and meta.pt",
            how={"fabric": "sharded"},
            model=None,
        ),
    ]


def _verl() -> list[Case]:
    """Return the cases of verl's actor directory: model, optimizer and extra state of each rank."""

    def case(name: str, what: str, version: int, **kwargs: Any) -> Case:
        how = {"version": version, **kwargs.pop("how", {})}
        kwargs = {"world": 4, "factory": "llama", "source": "global_step_3/actor", **kwargs}
        return Case(name, "verl", what, how=how, **kwargs)

    layers = "LlamaDecoderLayer"
    return [
        case("verl_fsdp2", "FSDP 2: DTensors", 2, also=(".", "global_step_3")),
        case("verl_fsdp2_tied", "the same, tied", 2, factory="llama_tied"),
        case(
            "verl_fsdp2_hf",
            "the weights once more in huggingface/, as bfloat16",
            2,
            how={"save": ["model", "optimizer", "extra", "hf_model"]},
            world=2,
        ),
        case("verl_fsdp1_orig", "FSDP 1 with original parameters", 1, how={"orig": True}, world=2),
        case(
            "verl_fsdp1_flat",
            "FSDP 1 as verl has it: the optimizer's state is flat and by index",
            1,
            how={"orig": False},
            wrap=layers,
        ),
        case(
            "verl_sample",
            "the same, small: kept in tests/data",
            1,
            how={"orig": False},
            world=2,
            factory="llama_small",
            wrap=layers,
            kept=True,
        ),
    ]


def _torchtitan() -> list[Case]:
    """Return the cases of torchtitan's step directories."""

    def case(name: str, what: str, **how: Any) -> Case:
        kept = how.pop("kept", False)
        how = {"last_save_model_only": False, "last_save_in_hf": False, **how}
        factory = how.pop("factory", "net")
        source = "checkpoint/step-3"
        also = ("checkpoint",)
        return Case(
            name,
            "torchtitan",
            what,
            factory=factory,
            source=source,
            also=also,
            kept=kept,
            how=how,
        )

    model_only = {"last_save_model_only": True}
    return [
        case("titan_full", "model names at the top, the optimizer flattened"),
        case("titan_sample", "the same, small: kept in tests/data", factory="tiny", kept=True),
        case("titan_model_only", "the last step is the model alone", **model_only),
        case(
            "titan_model_only_bf16",
            "the same, converted",
            export={"export_dtype": "bfloat16"},
            **model_only,
        ),
        case(
            "titan_hf",
            "the last step as consolidated safetensors",
            factory="llama",
            last_save_in_hf=True,
            **model_only,
        ),
    ]


def _fairscale() -> list[Case]:
    """Return the cases of fairscale's sharded and consolidated states."""

    def case(name: str, what: str, kind: str, *, flat: bool = True, **how: Any) -> Case:
        slots = how.pop("slots", True)
        how = {"kind": kind, "flat": flat, **how}
        whole = kind != "local"
        return Case(
            name,
            "fairscale",
            what,
            factory="plain",
            source="checkpoint.pt" if whole else ".",
            model=_named("plain") if whole else None,
            slots=slots,
            kept=name != "fairscale_flat_one",
            how=how,
        )

    return [
        case("fairscale_flat", "two units in the root, flat parameters", "local"),
        case("fairscale_flat_one", "one flat parameter", "local", nested=False),
        case("fairscale_split", "flatten_parameters=False", "local", flat=False),
        # Its optimizer counts the root's parameters first, then each unit's: no file says which.
        case("fairscale_whole", "gather_full_optim_state_dict", "whole", slots=False),
        case("fairscale_oss", "OSS after consolidate_state_dict", "oss"),
    ]


CASES: dict[str, Case] = {
    case.name: case
    for rows in (
        _accelerate(),
        _trainer(),
        _peft(),
        _lightning(),
        _verl(),
        _torchtitan(),
        _fairscale(),
    )
    for case in rows
}
if IS_GPU:  # see tests.judges.device
    CASES = {n: replace(case, world=1) if "fsdp2" in n else case for n, case in CASES.items()}

SHARDED_ADAPTERS = [  # case, what a user gives, the adapter, and where PEFT saved it
    ("peft_zero3", "checkpoint-2", "default", "saved"),
    ("peft_fsdp2", "whole", "default", "saved"),
    ("peft_fsdp2", "whole", "other", "saved/other"),
    ("peft_fsdp2", "alone", "other", "saved/other"),
]
SHARDED_METHODS = [  # those that are not LoRA
    ("peft_fsdp2", name, "default", f"methods/{name}") for name in ("ia3", "vera", "prefix")
]
