"""``reshard average`` of runs that DeepSpeed, FSDP 2 and transformers trained, against torch."""

from __future__ import annotations

import json
import shutil
from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import reshard
from reshard.errors import CorruptError, DifferentError, IncompleteError, UsageError
from tests.support.programs import run_reshard
from tests.support.sample_tensors import same

MIXED = {"z1_bf16": 2, "z3_bf16": 4, "dcp": 6, "hf": 4}  # run -> the step that is averaged
FOLDERS = {"z": "global_step", "d": "step-", "h": "checkpoint-"}


@pytest.fixture
def tag(sequences_made):
    """Return (run, step) -> its directory."""
    return lambda run, step: sequences_made / run / "run" / f"{FOLDERS[run[0]]}{step}"


@pytest.fixture
def expected(sequences_made):
    """Return (run, step) -> the fp32 weights that the live engine held."""
    return lambda run, step: torch.load(sequences_made / run / "found.pt")[step]


@pytest.fixture
def mixed(tag, expected):
    """Return paths and weights of one step of every framework's run."""
    return [tag(*each) for each in MIXED.items()], [expected(*each) for each in MIXED.items()]


def mean_of(weights, name):
    """Return what torch says in the stated arithmetic."""
    return torch.stack([each[name].double() for each in weights]).mean(0).float()


def assert_equal(path, wanted):
    got = load_file(path)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert same(got[name], value), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_mixture_of_layouts_is_the_mean_of_torch(mixed, tmp_path, dtype):
    paths, weights = mixed
    out = tmp_path / "mean.safetensors"
    report = reshard.average(paths, out, dtype=dtype)
    cast = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert_equal(out, {name: mean_of(weights, name).to(cast) for name in weights[0]})
    assert report.means == len(weights[0])
    assert [each["step"] for each in report.sources] == [None, 2, 4, 6]
    evidence = [line for line in report.lines() if line.startswith("identity")]
    assert sum(int(line.split()[1]) for line in evidence) == 4


@pytest.mark.parametrize("dtypes", [["bfloat16"] * 3, ["float16"] * 3, ["bfloat16", "float16"]])
def test_16_bit_files_have_the_mean_of_torch(tmp_path, dtypes):
    paths, weights = [], []
    for number, dtype in enumerate(dtypes):
        random = torch.Generator().manual_seed(number)
        value = torch.randn(700, 333, generator=random).to(getattr(torch, dtype))
        paths.append(tmp_path / f"{number}.safetensors")
        weights.append({"w": value, "odd": value[:1, :1].clone()})
        save_file(weights[-1], paths[-1])
    reshard.average(paths, tmp_path / "mean.safetensors", dtype="fp32")
    wanted = {name: mean_of(weights, name) for name in weights[0]}
    assert_equal(tmp_path / "mean.safetensors", wanted)


def test_the_order_of_the_arguments_changes_no_byte(mixed, tmp_path):
    paths, _ = mixed
    out = tmp_path / "mean.safetensors"
    written = set()
    for order in permutations(range(3)):
        chosen = [paths[n] for n in order]
        given = [(0.2, 0.3, 0.5)[n] for n in order]
        reshard.average(chosen, out, dtype="fp32", overwrite=True, weights=given)
        written.add(out.read_bytes())
    assert len(written) == 1


def test_ranks_workers_and_layouts_change_no_byte(mixed, tmp_path):
    paths, _ = mixed
    reshard.average(paths, tmp_path / "a.safetensors", dtype="fp32", workers=1)
    reshard.split(paths[0], tmp_path / "ws5", world_size=5)
    reshard.split(paths[1], tmp_path / "dcp", to="dcp", world_size=2)
    others = [tmp_path / "ws5", tmp_path / "dcp", *paths[2:]]
    small = {"workers": 3, "max_memory_bytes": 1 << 19}
    reshard.average(others, tmp_path / "b.safetensors", dtype="fp32", **small)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("given", ["0.2,0.3,0.5", "1/3,1/3,1/3", "-0.5,1,0.5"])
def test_weights_are_factors_in_float64(mixed, tmp_path, given):
    paths, weights = mixed
    out = tmp_path / "mean.safetensors"
    reshard.average(paths[:3], out, dtype="fp32", weights=given)
    numbers = [float(a) / float(b or 1) for a, _, b in (t.partition("/") for t in given.split(","))]
    wanted = {}
    for name in weights[0]:
        products = [w * each[name].double() for w, each in zip(numbers, weights[:3], strict=True)]
        wanted[name] = (products[0] + products[1] + products[2]).float()
    assert_equal(out, wanted)


def test_ema_follows_the_steps_of_the_files(tag, expected, tmp_path):
    out = tmp_path / "ema.safetensors"
    steps = (4, 6, 2)
    report = reshard.average([tag("z1_bf16", s) for s in steps], out, dtype="fp32", ema=0.75)
    assert [(s["step"], s["weight"]) for s in report.sources] == [
        (2, 0.5625),
        (4, 0.1875),
        (6, 0.25),
    ]
    weights = [expected("z1_bf16", step) for step in (2, 4, 6)]
    wanted = {}
    for name in weights[0]:
        average = weights[0][name].double()
        for each in weights[1:]:
            average = 0.75 * average + 0.25 * each[name].double()
        wanted[name] = average.float()
    assert_equal(out, wanted)


@pytest.mark.parametrize("run", ["z2_menagerie", "dcp_tied", "hf"])
def test_the_last_checkpoints_of_a_run(sequences_made, tag, tmp_path, run):
    """With 0-d, empty, frozen and tied tensors, and buffers of four dtypes."""
    reshard.average([tag(run, 6), tag(run, 4)], tmp_path / "a.safetensors")
    report = reshard.average(sequences_made / run / "run", tmp_path / "b.safetensors", last=2)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert report.optimizer_tensors_left == (0 if run == "hf" else report.optimizer_tensors_left)


def test_tensors_of_unusual_dtypes_and_shapes_are_averaged(tag, expected, tmp_path):
    out = tmp_path / "mean.safetensors"
    report = reshard.average([tag("z2_menagerie", s) for s in (2, 6)], out, dtype="fp32")
    weights, got = [expected("z2_menagerie", s) for s in (2, 6)], load_file(out)
    for name in weights[0]:
        assert same(got[name], mean_of(weights, name)), name
    assert got["extras.hollow.empty"].shape == (0, 5)
    assert got["extras.scalar"].shape == ()
    assert got["extras.pair"].dtype == torch.bfloat16
    assert report.equal == ["extras.mask"]
    calls = [torch.tensor(2**40 + 1 + step) for step in (2, 6)]  # of each rank's micro batches
    assert same(got["extras.calls"], calls[1])
    assert any("the counter extras.calls has the values" in text for text in report.warnings)


def test_a_directory_loads_with_transformers_and_stays_tied(tag, expected, tmp_path):
    paths = [tag("z3_tied", 4), tag("dcp_tied", 6), tag("hf_tied", 2)]
    report = reshard.average(paths, tmp_path / "model")
    assert report.dropped_aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    weights = [expected("z3_tied", 4), expected("dcp_tied", 6), expected("hf_tied", 2)]
    for name in weights[0]:
        assert same(state[name], mean_of(weights, name)), name


def test_a_tied_head_that_one_file_stores_again_must_be_equal(tag, tmp_path):
    """No config says anything here: one source ties by its optimizer, the other only by values."""
    state = load_file(tag("hf_tied", 2) / "model.safetensors")
    both = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(both, tmp_path / "both.safetensors")
    shutil.copytree(tag("z3_tied", 4), tmp_path / "run")
    paths = [tmp_path / "both.safetensors", tmp_path / "run"]
    report = reshard.average(paths, tmp_path / "a.safetensors")
    assert "lm_head.weight" in report.dropped_aliases
    assert "lm_head.weight" not in load_file(tmp_path / "a.safetensors")
    both["lm_head.weight"][3, 3] += 1
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(DifferentError, match=r"the values of 'lm_head\.weight' differ"):
        reshard.average(paths, tmp_path / "b.safetensors")


def test_an_average_can_be_split_to_a_training_layout(tag, expected, tmp_path):
    """In two steps: the fp32 mean, which becomes the master weights of a new run in bf16."""
    reshard.average([tag("z1_bf16", s) for s in (2, 6)], tmp_path / "mean", dtype="fp32")
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps([{"lr": 1e-3}]))
    reshard.split(
        tmp_path / "mean",
        tmp_path / "run",
        to="deepspeed",
        zero_stage=3,
        world_size=3,
        dtype="bf16",
        init_optimizer="zeros",
        param_groups=groups,
    )
    weights = [expected("z1_bf16", s) for s in (2, 6)]
    with reshard.open(tmp_path / "run") as checkpoint:
        for name in weights[0]:
            assert same(checkpoint[name][...], mean_of(weights, name)), name


def test_what_is_refused(sequences_made, tag, tmp_path):
    out = tmp_path / "mean.safetensors"

    def refuses(error, text, *paths, **options):
        with pytest.raises(error, match=text):
            reshard.average(paths, out, **options)
        assert not out.exists()

    a, b, hf = tag("z1_bf16", 2), tag("z1_bf16", 4), tag("hf", 2)
    refuses(UsageError, "the mean is not a run of python -m trainer", a, b, to="trainer")
    (tmp_path / "again").symlink_to(a)
    refuses(UsageError, "needs at least two", a)
    refuses(UsageError, "is the same checkpoint as", a, b, tmp_path / "again")
    refuses(UsageError, "different dtypes: float32 of .*hf.* and bfloat16 of", a, hf)
    refuses(UsageError, "no file states the step of .*hf", b, hf, ema=0.9, dtype="bf16")
    refuses(UsageError, "both of step 2", a, tag("z3_bf16", 2), ema=0.9, dtype="bf16")
    refuses(UsageError, "has 2 weights for 3", a, b, hf, weights="0.5,0.5")
    refuses(UsageError, "the sum is 4", a, b, weights="1,3")
    refuses(UsageError, "1/4,3/4", a, b, weights="1,3")  # what to pass instead
    refuses(UsageError, "exclude each other", a, b, weights="1,0", ema=0.5)
    refuses(UsageError, "between 0 and 1", a, b, ema=1.0)
    refuses(UsageError, "has 3 numbered checkpoints", sequences_made / "dcp/run", last=4)
    refuses(
        DifferentError,
        "does not have 32 tensors of .*: llama",
        a,
        tag("z2_menagerie", 2),
        dtype="bf16",
    )
    refuses(UsageError, "merge each checkpoint with", a, b, replicas="mean")


def test_another_shape_is_refused_by_name(tag, tmp_path):
    state = load_file(tag("hf", 2) / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"][:-1].clone()
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(DifferentError, match=r"'model.norm.weight' has shape \[6\d\]"):
        reshard.average([tag("hf", 4), tmp_path / "a.safetensors"], tmp_path / "out.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_checkpoint_that_diverged_is_refused(tag, tmp_path, value):
    state = load_file(tag("hf", 2) / "model.safetensors")
    state["model.norm.weight"][5] = value
    save_file(state, tmp_path / "a.safetensors")
    paths = [tag("hf", 4), tmp_path / "a.safetensors"]
    with pytest.raises(CorruptError, match=r"infinite or NaN \(first at element 5\)"):
        reshard.average(paths, tmp_path / "out.safetensors", weights=[-1, 2])
    assert not (tmp_path / "out.safetensors").exists()


def test_integers_must_be_equal_and_copies_are_named(tag, tmp_path):
    state = load_file(tag("hf", 2) / "model.safetensors")
    for name, ids in {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 4]}.items():
        save_file({**state, "ids": torch.tensor(ids)}, tmp_path / f"{name}.safetensors")
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    report = reshard.average([a, b], tmp_path / "out.safetensors")
    assert report.equal == ["ids"]
    assert any("one is a copy of the other" in text for text in report.warnings)
    with pytest.raises(DifferentError, match="int64 values differ between"):
        reshard.average([a, c], tmp_path / "other.safetensors")


def test_the_newest_save_must_be_complete(sequences_made, tmp_path):
    run = shutil.copytree(sequences_made / "z1_bf16/run", tmp_path / "run")
    (run / "global_step8").mkdir()
    with pytest.raises(IncompleteError, match="no complete checkpoint of step 8"):
        reshard.average(run, tmp_path / "out.safetensors", last=2)
    shutil.rmtree(run / "global_step8")
    shutil.move(run / "global_step2", run / "global_step8")
    with pytest.raises(DifferentError, match=r"states step 2, but .* states step 6"):
        reshard.average(run, tmp_path / "out.safetensors", last=2, trust="none")


def test_a_damaged_source_is_detected(tag, tmp_path):
    run = shutil.copytree(tag("z3_bf16", 4), tmp_path / "run")
    path = next(run.glob("*rank_1*optim_states.pt"))
    with reshard.open(run) as checkpoint:
        entry = checkpoint.manifest.entries["master", "model.embed_tokens.weight"]
    chunk = next(c for c in entry.chunks if c.file == str(path))
    with path.open("r+b") as file:
        file.seek(chunk.byte_offset + 64)
        byte = file.read(1)
        file.seek(chunk.byte_offset + 64)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptError):
        reshard.average([run, tag("z3_bf16", 6)], tmp_path / "out.safetensors", trust="none")
    assert not (tmp_path / "out.safetensors").exists()


def test_the_command(sequences_made, tmp_path):
    run, out = sequences_made / "z1_bf16/run", tmp_path / "mean"
    done = run_reshard("average", run, out, "--last", "3", "--ema", "0.5", "--json")
    found = json.loads(done.stdout)
    assert found["command"] == "average"
    assert [each["given"] for each in found["sources"]] == ["1/4", "1/4", "1/2"]
    done = run_reshard("average", run, tmp_path / "dry", "--last", "2", "--dry-run")
    assert "would write" in done.stdout
    assert "0.5 x " in done.stdout
    assert not (tmp_path / "dry").exists()
    page = tmp_path / "page.html"
    run_reshard("average", run, tmp_path / "b", "--last", "2", "--html", page)
    assert "global_step4" in page.read_text()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"use_cache": False, "transformers_version": "4.1", "_name_or_path": "x"}, ""),
        ({"torch_dtype": "float16", "eos_token_id": 5}, ""),
        ({"num_attention_heads": 2}, "num_attention_heads is 4 and 2"),
        ({"rope_theta": 5000.0, "rope_parameters": None}, "rope_theta is 10000.0 and 5000.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type is default and li"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 1e-06 and 0.1"),
    ],
)
def test_configs_that_contradict_each_other_are_refused(values, text, tmp_path):
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=16,
    )
    for name in "ab":
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    path = tmp_path / "b" / "config.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    if not text:
        reshard.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
        return
    with pytest.raises(DifferentError, match=text):
        reshard.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
