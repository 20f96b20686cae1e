"""The options that commands share, in groups, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import click

from reshard.paths import as_path

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # which takes no parameter before click 8.4

Command = Callable[..., Any]
Option = Callable[[Command], Command]

_MEGATRON = "reshard.formats.megatron.words"


class OneOf(_Choice):
    """One of the words of a module, which is imported no sooner than they are needed.

    Args:
        module: its dotted name.
        name: what is there: a sequence of words, or the `Literal` of them.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(())
        del self.choices
        self._home = module, name

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        from importlib import import_module

        module, words = self._home
        found = getattr(import_module(module), words)
        self.choices = get_args(found) or tuple(found)
        return self.choices


class _Where(click.Path):
    """A path of this machine, or a URL."""

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """As every layer below takes it."""
        return as_path(value)


PATH = _Where()
TARGET = OneOf("reshard.formats.targets", "NAMES")


def together(*options: Option) -> Option:
    """Several options as one; ``--help`` shows the last first."""

    def add(command: Command) -> Command:
        for option in options:
            command = option(command)
        return command

    return add


sources = click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=PATH)

vocab_size = click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Rows that are words, not padding."
)

family = click.option(
    "--family", help="Which of Hugging Face's models it is: llama, mistral, qwen2, ..."
)

# How a source is read; the same for every command.
source = together(
    click.option("-v", "--verbose", is_flag=True, help="Show tracebacks."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    click.option(
        "--rules",
        type=PATH,
        metavar="FILE",
        help="YAML: how parameters are cut that no table knows, and what others call them.",
    ),
    click.option("--wrap", help="How FSDP 1 wrapped --model: CLASS[,CLASS], size=N or none."),
    click.option("--model", help="config.json, its directory, or module:factory."),
    click.option("--key", help="State dict, where SOURCE holds several; dotted."),
    click.option("--tag", "--step", "tag", help="Checkpoint of a run directory."),
    click.option(
        "--from", "source_format", type=OneOf("reshard.formats", "NAMES"), help="Skip detection."
    ),
)

# Of every command whose report can be a page.
html = click.option(
    "--html",
    type=PATH,
    metavar="FILE",
    help="Also write the report as a page that needs only a browser.",
)

# The same of commands that write nothing else.
page = together(
    click.option("--overwrite", is_flag=True, help="Replace the file of --html."),
    html,
)

# What reading tensors may take, and trust.
budget = together(
    click.option(
        "--max-memory",
        default="256MiB",
        show_default=True,
        help="For the buffers of all workers.",
    ),
    click.option("--workers", default=0, help="Threads; the output does not depend on it."),
    click.option(
        "--allow-pickle",
        multiple=True,
        metavar="NAME",
        help="Accept an unknown class (never run).",
    ),
)

# How files are written; the same for every command that writes.
output = together(
    click.option("-q", "--quiet", is_flag=True, help="No progress, no report."),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--no-verify", is_flag=True, help="Do not read the output back."),
    click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped."),
    click.option("--overwrite", is_flag=True, help="Replace DESTINATION, and --html's file."),
    html,
    budget,
    click.option(
        "--replicas",
        type=click.Choice(["error", "first", "mean"]),
        default="error",
        show_default=True,
        help="Ranks that hold different values of one tensor: refused, the first, their mean.",
    ),
    click.option(
        "--on-overflow",
        type=click.Choice(["error", "clamp", "allow"]),
        default="error",
        show_default=True,
        help="When a finite value would become infinite.",
    ),
    click.argument("destination", type=PATH),
)

_parallel = together(
    *(
        click.option(f"--{name}", type=click.IntRange(min=1), help=what)
        for name, what in (
            ("dp", "Ranks that see different data.  [default: --world-size / (tp x pp)]"),
            ("ep", "Ranks that share a layer's experts.  [default: as is]"),
            ("pp", "Pipeline-parallel ranks.  [default: as is]"),
            ("tp", "Tensor-parallel ranks.  [default: as is]"),
        )
    )
)

_megatron = together(
    click.option(
        "--make-vocab-size-divisible-by",
        type=click.IntRange(min=1),
        help="Times the tensor parallel size, as Megatron pads.  [default: as is, else 128]",
    ),
    click.option(
        "--transformer-impl",
        type=OneOf(_MEGATRON, "Impl"),
        help="Whose layers Megatron will have.  [default: as is, else transformer_engine]",
    ),
    click.option(
        "--extra-state",
        type=OneOf(_MEGATRON, "ExtraState"),
        help="Transformer Engine's own.  [default: keep, where they can be]",
    ),
    click.option(
        "--adam",
        type=OneOf(_MEGATRON, "Adam"),
        help="Whose state Megatron will load.  [default: as is, else fused]",
    ),
    click.option(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=None,
        help="Whether Megatron's will load it.  [default: as is]",
    ),
    click.option(
        "--ckpt-format",
        type=OneOf(_MEGATRON, "Form"),
        help="Megatron's.  [default: as is, else torch]",
    ),
    click.option(
        "--stage-layers", metavar="N,N,...", help="Of each pipeline stage.  [default: as many each]"
    ),
    click.option("--vpp", type=click.IntRange(min=1), help="Model chunks of a pipeline rank."),
)

# How a target is laid out, but for its name and its number of ranks.
layout = together(
    click.option(
        "--tp-plan",
        type=PATH,
        metavar="FILE",
        help="JSON, pattern -> colwise|rowwise|replicate|dim.  [default: the model's own plan]",
    ),
    click.option(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="Of DTensor files: dp_shard=4,tp=2.  [default: one axis of all ranks]",
    ),
    click.option(
        "--names",
        type=click.Choice(["source", "hf"]),
        help="Whose.  [default: the source's; Megatron's for --to megatron]",
    ),
    family,
    vocab_size,
    _megatron,
    _parallel,
    click.option("--device", default="cuda", show_default=True, help="Of DTensor files' mesh."),
    click.option("--weights-only", is_flag=True, help="Leave the optimizer out."),
    click.option(
        "--init-optimizer",
        type=OneOf("reshard.formats.fresh_adam", "InitOptimizer"),
        help="Where SOURCE has no optimizer: none, or an Adam of zeros at step 0.",
    ),
    click.option(
        "--param-groups",
        type=PATH,
        metavar="FILE",
        help="JSON: param groups and hyper-parameters.  [default: as is]",
    ),
    click.option(
        "--dtype", help="Of the module's parameters: bf16, fp16 or fp32.  [default: as trained]"
    ),
    click.option(
        "--rng",
        type=OneOf("reshard.formats.rng", "Policy"),
        help="Random states of ranks.  [default: keep, where they can be]",
    ),
    click.option(
        "--zero-stage",
        type=click.IntRange(0, 3),
        help="Of DeepSpeed.  [default: as is]",
    ),
    click.option(
        "--state-dict-type",
        type=OneOf("reshard.formats.targets.request", "STATE_DICT_TYPES"),
        help="Of FSDP, or unsharded.  [default: as is, else sharded]",
    ),
    click.option("--rank-files", is_flag=True, help="Of FSDP: a file a rank, not DCP."),
    click.option(
        "--fsdp-version",
        type=click.IntRange(1, 2),
        default=2,
        show_default=True,
        help="Of verl's files; 1 needs --model and --wrap.",
    ),
    click.option(
        "--use-orig-params",
        metavar="DTYPE",
        help="FSDP 1 with the original parameters; DTYPE of its forward pass.",
    ),
)

_world_size = click.option(
    "--world-size",
    "--num-shards",
    "world_size",
    type=click.IntRange(min=1),
    help="Ranks of the run to come.  [default: as the source]",
)


def resharding(to: Option) -> Option:
    """All that split and convert take; they differ in whether ``--to`` must be given."""
    return together(source, layout, _world_size, to, output, sources)
