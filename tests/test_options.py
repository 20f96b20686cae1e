"""Options are declared once; the command line, Python keywords, checks and JSON follow."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import reshard
from reshard.cli import cli
from reshard.cli.options import Command, take_options
from reshard.errors import UsageError
from reshard.options import Options, build_options, nested_options, option, options_of, size_option
from reshard.units import parse_bytes

KINDS = {
    "inspect": reshard.InspectOptions,
    "merge": reshard.MergeOptions,
    "split": reshard.SplitOptions,
    "diff": reshard.DiffOptions,
    "verify": reshard.VerifyOptions,
    "resume_check": reshard.ResumeCheckOptions,
}
Colour = Literal["red", "green"]


@dataclass(frozen=True, kw_only=True)
class Inner(Options):
    deep: bool = option(False, "Go deep.", group="Inner")


@dataclass(frozen=True, kw_only=True)
class Sample(Options):
    colour: Colour | None = option(None, "A colour.", group="Looks", unset="any")
    sizes: Sequence[int] = option((), "Sizes.", group="Looks", flags=("--size",), minimum=1)
    keep: bool = option(True, "Keep nothing.", group="Looks", flags=("--no-keep",))
    paint: bool | None = option(None, "Paint it.", group="Looks")
    limit_bytes: int = size_option("1KiB", "A limit.", flag="--limit", group="Looks")
    place: str | Path | None = option(None, "A place.", group="Looks", shapes_output=False)
    mood: str | None = option(
        None, "A mood.", group="Looks", choices=("calm",), find_choices=lambda: ("calm", "wild")
    )
    inner: Inner = nested_options(Inner)
    team: int = 3


def parsed(*arguments):
    """Return the dataclass that a command gets for these options."""
    command = Command("sample", callback=lambda **values: values)
    command._name_of_kind = "Sample"
    reshard.Sample = Sample  # where commands find the dataclasses
    try:
        values = command.main(list(arguments), standalone_mode=False)
    finally:
        del reshard.Sample
    return take_options(Sample, values)


def test_the_type_of_a_field_decides_what_the_command_line_takes():
    assert parsed() == Sample()
    given = parsed("--size", "2", "--size", "3", "--no-keep", "--no-paint", "--limit", "2KiB")
    assert given == Sample(sizes=(2, 3), keep=False, paint=False, limit_bytes=2048)
    given = parsed("--deep", "--colour", "red", "--place", "here", "--paint")
    assert given == Sample(inner=Inner(deep=True), colour="red", place=Path("here"), paint=True)


@pytest.mark.parametrize("wrong", [("--colour", "blue"), ("--size", "0"), ("--size", "x")])
def test_a_wrong_value_is_refused_by_the_command_line(wrong):
    with pytest.raises(click.UsageError):
        parsed(*wrong)


def test_a_choice_that_an_extension_adds_is_allowed():
    assert parsed("--mood", "wild") == Sample(mood="wild")
    with pytest.raises(click.UsageError, match="'calm', 'wild'"):
        parsed("--mood", "odd")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"colour": "blue"}, "colour='blue' must be one of red, green"),
        ({"sizes": (1, 0)}, "sizes=0 must be at least 1"),
        ({"mood": "odd"}, "mood='odd' must be one of calm, wild"),
    ],
)
def test_a_wrong_value_is_refused_in_python(wrong, message):
    with pytest.raises(UsageError, match="must be") as caught:
        Sample(**wrong)
    assert str(caught.value).replace(":", "") == message


def test_the_options_that_were_given_are_ready_for_json():
    assert Sample().given() == {}
    given = Sample(sizes=(2,), place=Path("a"), inner=Inner(deep=True), team=5).given()
    assert json.loads(json.dumps(given)) == {"sizes": [2], "place": "a", "deep": True}


def test_only_options_that_shape_the_output_are_compared_by_resume():
    shaping = Sample().shaping_output()
    assert {"colour", "inner", "limit_bytes"} <= shaping.keys()
    assert not {"place", "team"} & shaping.keys()


def test_flat_values_build_the_dataclasses_within():
    values = {each.name: each.default for each in options_of(Sample)} | {"deep": True}
    assert build_options(Sample, values, team=4) == Sample(inner=Inner(deep=True), team=4)


@pytest.mark.parametrize("name", KINDS)
def test_a_function_has_the_fields_of_its_options_as_keywords(name):
    parameters = inspect.signature(getattr(reshard, name)).parameters.values()
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert keywords == {each.name for each in fields(KINDS[name])} - {"team"}
    assert cli.commands[name.replace("_", "-")].declared is KINDS[name]


def test_help_describes_each_keyword_in_a_sentence():
    text = reshard.merge.__doc__
    assert "dtype: Dtype of the weights: bf16, fp16, fp32 or keep (as stored)." in text
    assert "verify: False: Do not read the output back." in text
    assert "edits: reshard.Edits(" in text
    assert "object at 0x" not in str(inspect.signature(reshard.merge))
    for name in (*KINDS, "open", "open_files", "average", "plan"):
        function = getattr(reshard, name)
        described = set(re.findall(r"^        (\w+): ", function.__doc__, re.MULTILINE))
        assert inspect.signature(function).parameters.keys() <= described, name


def test_the_name_of_another_command_leads_to_the_function():
    with pytest.raises(AttributeError, match=r"split\(to=...\) converts"):
        reshard.convert  # noqa: B018


def test_diff_takes_the_word_of_its_report_and_its_plural(tmp_path):
    a = tmp_path / "a.safetensors"
    save_file({"x.weight": torch.ones(3)}, a)
    for kind in ("weight", "weights"):
        assert reshard.diff(a, a, kinds=[kind]).equal_by_kind == {"weight": 1}
    with pytest.raises(UsageError, match="must be one of optimizer, train, weight"):
        reshard.diff(a, a, kinds=["weigths"])


def test_a_layout_that_merge_writes_is_refused_with_the_name_of_merge(tmp_path):
    done = CliRunner().invoke(cli, ["convert", "a", str(tmp_path / "b"), "--to", "huggingface"])
    assert done.exit_code == 2
    assert "'torch'" in done.output
    assert ".\nfor a Hugging Face model: reshard merge" in done.output
    with pytest.raises(UsageError, match="for a Hugging Face model: reshard merge"):
        reshard.split("a", tmp_path / "b", to="huggingface")


def test_a_choice_is_shown_as_it_is_declared_and_taken_in_two_spellings(tmp_path):
    arguments = ["convert", "--to", "megatron", "--ckpt-format"]
    shown = CliRunner().invoke(cli, ["convert", "--to", "megatron", "--help"]).output
    assert "[torch|torch_dist]" in shown
    refused = CliRunner().invoke(cli, [*arguments, "zarr", "a", "b"])
    assert "is not one of 'torch', 'torch_dist'" in refused.output
    for value in ("torch_dist", "torch-dist"):
        done = CliRunner().invoke(cli, [*arguments, value, str(tmp_path / "a"), "b"])
        assert "does not exist" in str(done.output) + str(done.exception)


def test_reports_list_the_options_that_were_given(tmp_path):
    a = tmp_path / "a.safetensors"
    save_file({"x.weight": torch.ones(3)}, a)
    merged = reshard.merge(
        source=a, destination=tmp_path / "b.safetensors", dtype="bf16", workers=1
    )
    assert merged.to_dict()["options"] == {"dtype": "bf16", "workers": 1}
    for arguments, expected in (
        (["inspect", a], {}),
        (["verify", a, "--deep"], {"deep": True}),
        (["diff", a, a, "--kind", "weight"], {"kinds": ["weight"]}),
        (["split", a, tmp_path / "c", "--to", "dcp", "--dry-run"], {"to": "dcp", "dry_run": True}),
        (["merge", a, tmp_path / "d", "--rename", "x=y"], {"rename": [["x", "y"]]}),
    ):
        done = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
        assert json.loads(done.stdout)["options"] == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reshard.SplitOptions(world_size="2"), "world_size='2': must be an integer"),
        (lambda: reshard.SplitOptions(world_size="auto"), r"int\(os.environ\["),
        (lambda: reshard.SplitOptions(world_size=True), "world_size=True: must be an integer"),
        (lambda: reshard.SplitOptions(world_size=2.0), "world_size=2.0: must be an integer"),
        (lambda: reshard.InspectOptions(tag=4), "tag=4: must be a string"),
        (lambda: reshard.MergeOptions(overwrite="no"), "overwrite='no': must be True or False"),
        (
            lambda: reshard.DiffOptions(ignore="rng"),
            "ignore='rng': must be a list",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_path_can_be_a_string():
    assert reshard.MergeOptions(hf_dir="base").hf_dir == Path("base")
    assert reshard.SplitOptions(rules="s3://bucket/rules.yaml").rules != Path("s3:/bucket")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_shard_size", "did you mean max_shard_bytes?"),
        ("exclude", "did you mean edits=reshard.Edits(exclude=...)?"),
        ("dtyp", "did you mean dtype?"),
        ("qqqqqqq", "help(reshard.merge) lists them"),
    ],
)
def test_an_unknown_keyword_gets_the_right_one(name, advice):
    with pytest.raises(TypeError) as caught:
        reshard.merge("run", "model", **{name: 1})
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "text", ["0", "0.0GB", "0.5", "0.0001KB", "5XB", "", "-1", "9" * 400 + "TB"]
)
def test_a_size_of_less_than_a_byte_is_refused(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text, "--max-shard-size")


def test_a_title_names_targets_only_if_every_option_below_it_is_of_some():
    for command, title in (("plan", "Training"), ("split", "Megatron (--to megatron)")):
        assert f"\n{title}:\n" in CliRunner().invoke(cli, [command, "--help-all"]).output
