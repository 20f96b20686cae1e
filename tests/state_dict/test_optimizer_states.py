"""Optimizers that are no Adam: their whole state goes along, and a real one goes on from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import reshard
from reshard import formats
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.errors import DifferentError, IncompleteError, UnsupportedError, UsageError
from reshard.live.dcp import live_objects
from reshard.model import shapes_of
from tests.support.installed import TORCH_2_6


class Lion(torch.optim.Optimizer):
    """The state and the settings of lion-pytorch 0.2: an exp_avg, no step, no eps."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(moment.lerp(param.grad, 0.1).sign(), alpha=group["lr"])
                moment.lerp_(param.grad, 0.01)


class Preconditioned(torch.optim.Adam):
    """Lists and dicts of tensors beside an Adam's, as SOAP and Shampoo keep them."""

    @torch.no_grad()
    def step(self):
        super().step()
        for param, state in self.state.items():
            state["beta"] = 0.5
            if param.ndim == 2:
                state["GG"] = [param @ param.T, None, param.T @ param]
                state["left"] = {"inverse": param @ param.T, "updates": 3}


class EightBit(torch.optim.Optimizer):
    """What bitsandbytes 0.50 keeps: a dict of its own, with one map for all that is quantised."""

    KEY = "__bnb_optimizer_quant_state__"

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8})
        self.map = torch.linspace(0, 1, 256)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                kept = {"state1": param.grad.square()}
                if param.ndim > 1:  # the large ones are quantised
                    scale = param.grad.abs().max().reshape(1)
                    codes = (param.grad.abs() / scale * 255).to(torch.uint8)
                    kept = {"state1": codes, "qmap1": self.map, "absmax1": scale}
                state[self.KEY] = kept
                param.sub_(param.grad, alpha=group["lr"] / state["step"])


class Stacked(torch.optim.Optimizer):
    """AdEMAMix of bitsandbytes 0.50, which has two moments in one tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.99, 0.999)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                moments = torch.stack([param.grad, param.grad / 2])
                state[EightBit.KEY] = {"state1": moments, "state2": param.grad.square()}
                param.sub_(moments.sum(0), alpha=group["lr"] / state["step"])


class Numbered(torch.optim.Optimizer):
    """The state of heavyball 3.2: a dict for each part of a parameter, by number, with a set."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param].setdefault(0, {})
                if 2 not in state.setdefault("is_initialized", set()):
                    state["exp_avg_2"] = torch.zeros_like(param)
                    state["is_initialized"] |= {0, 2}
                state["exp_avg_2"].lerp_(param.grad, 0.1)
                param.sub_(state["exp_avg_2"], alpha=group["lr"])


class StableAdamW(torch.optim.Optimizer):
    """The state of torch-optimi 0.3.3: it counts in a tensor of the group."""

    def __init__(self, params):
        defaults = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}
        super().__init__(params, {**defaults, "foreach": None, "setup": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["setup"]:
                group["setup"], group["step"] = True, torch.tensor(0, dtype=torch.int32)
            group["step"].add_(1)
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("eps_sq", torch.tensor(group["eps"] ** 2))
                state.setdefault("kahan_comp", None)
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                square.lerp_(param.grad.square(), 0.01).clamp_(min=state["eps_sq"])
                mean.lerp_(param.grad, 0.1 ** group["step"])
                param.addcdiv_(mean, square.sqrt(), value=-group["lr"])


class KeyedByTensors(torch.optim.SGD):
    """GrokAdamW 0.1.2 keeps its state in the param group, by parameter, and cannot load it."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2)

    def step(self):
        super().step()
        for group in self.param_groups:
            group["state"] = {param: {"step": 1} for param in group["params"]}


def with_a_rate_in_a_tensor(params):
    return torch.optim.Adam(params, lr=torch.tensor(1e-2))


def adafactor(params):
    from transformers import Adafactor

    return Adafactor(params)


MADE = {
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adafactor": adafactor,
    "lion": Lion,
    "preconditioned": Preconditioned,
    "eight bits": EightBit,
    "stacked": Stacked,
    "numbered": Numbered,
    "stable adamw": StableAdamW,
    "a rate in a tensor": with_a_rate_in_a_tensor,
}


def fresh(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    params = list(model.parameters())
    wide = [param for param in params if param.ndim > 1]
    rest = [param for param in params if param.ndim < 2]
    return model, make([{"params": wide, "weight_decay": 0.1}, {"params": rest}])


def train(model, optimizer):
    model(torch.arange(6.0).reshape(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(value, path=()):
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in items for k, v in flat(item, (*path, key)).items()}
    is_tensor = isinstance(value, torch.Tensor)
    return {path: (value.dtype, value.shape, value.tolist()) if is_tensor else value}


def without_names(states):
    """Return groups whose shapes alone do not determine the parameters' names."""
    return {key: value for key, value in flat(states).items() if "param_names" not in key}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("way", [("torch",), ("dcp", "torch"), ("accelerate", "torch")], ids=str)
def test_it_goes_along_whole(name, way, tmp_path):
    model, optimizer = fresh(MADE[name])
    for _ in range(2):
        train(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(saved, tmp_path / "source.pt")
    place = tmp_path / "source.pt"
    for number, target in enumerate(way):
        split(place, tmp_path / str(number), SplitOptions(to=target))
        place = tmp_path / str(number)
    got = torch.load(place / "checkpoint.pt", weights_only=False)
    assert without_names(got["optimizer"]) == without_names(optimizer.state_dict())
    again, resumed = fresh(MADE[name])
    again.load_state_dict(got["model"])
    resumed.load_state_dict(got["optimizer"])
    for _ in range(2):
        train(model, optimizer)
        train(again, resumed)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


NOT_TORCH_2_6 = pytest.mark.skipif(
    TORCH_2_6,
    reason="torch 2.6 does not flatten the state of an optimizer that contains a dict",
)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["adafactor", pytest.param("eight bits", marks=NOT_TORCH_2_6)])
def test_it_goes_along_whole_where_dcp_has_it_flattened(name, tmp_path):
    model, optimizer = fresh(MADE[name])
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "source")
    split(tmp_path / "source", tmp_path / "out", SplitOptions(to="torch"))
    got = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=False)["optimizer"]
    assert without_names(got) == without_names(optimizer.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeed_has_the_values_of_codes_unless_it_keeps_whole_states(stage, tmp_path):
    model, optimizer = fresh(EightBit)
    train(model, optimizer)
    want = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": want, "step": 1}, tmp_path / "a.pt")
    shares = SplitOptions(to="deepspeed", zero_stage=stage, dtype="fp32", world_size=2)
    report = split(tmp_path / "a.pt", tmp_path / "shares", shares)
    assert any("in float32" in note for note in report.derived) == bool(stage)
    split(tmp_path / "shares", tmp_path / "out", SplitOptions(to="torch"))
    got = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=False)["optimizer"]
    for state in want["state"].values() if stage else ():
        held = state[EightBit.KEY]
        if "qmap1" in held:
            values = optimizer.map[held["state1"].int()] * held["absmax1"]
            state[EightBit.KEY] = {"state1": values}
    assert without_names(got) == without_names(want)


def test_fsdp_1_saves_a_part_of_the_state_of_bitsandbytes(tmp_path):
    """``optim_state_dict`` copies the first rank's part of a unit to each of its parameters."""
    model, optimizer = fresh(EightBit)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    codes = states["state"]["0.weight"][EightBit.KEY]
    codes["state1"] = codes["state1"].flatten()[:10]
    torch.save({"model": weights, "optimizer": states}, tmp_path / "a.pt")
    with pytest.raises(IncompleteError, match=r"10 elements for '0.weight', which has 15"):
        split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="torch"))
    split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="torch", weights_only=True))


def test_a_parameter_whose_state_is_an_object_is_not_frozen(tmp_path):
    """Only the moments of large parameters are objects of a class of torchao."""
    model, optimizer = fresh(torch.optim.AdamW)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.device("cpu"))
    states["state"]["0.weight"] |= moments
    torch.save({"model": weights, "optimizer": states}, tmp_path / "a.pt")
    with reshard.open(tmp_path / "a.pt") as checkpoint:
        assert not checkpoint.manifest.frozen


def test_half_an_adam_is_refused(tmp_path):
    model, optimizer = fresh(torch.optim.AdamW)
    train(model, optimizer)
    saved = optimizer.state_dict()
    del saved["state"][1]["exp_avg_sq"]
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "a.pt")
    with pytest.raises(IncompleteError, match=r"no exp_avg_sq of 2.weight, but other state"):
        split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="dcp"))
    with pytest.raises(IncompleteError, match=r"of '2.weight', but no exp_avg_sq of it"):
        split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="dcp", trust="none"))


def test_what_can_only_be_described_is_refused(tmp_path):
    model, optimizer = fresh(torch.optim.AdamW)
    train(model, optimizer)
    saved = optimizer.state_dict()
    saved["state"][1]["pairs"] = {(0, 1): torch.ones(2)}
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match=r"stores 'pairs' of '2.weight' as an object"):
        split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="dcp"))


def two_optimizers(first, second):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    params = list(model.parameters())
    parts = [[params[at] for at in places] for places in (first, second)]
    made = [torch.optim.AdamW(parts[0]), torch.optim.SGD(parts[1], lr=0.1, momentum=0.9)]
    model(torch.ones(2, 3)).square().sum().backward()
    for optimizer in made:
        optimizer.step()
    return {"model": model.state_dict(), "optimizers": [one.state_dict() for one in made]}


def test_a_state_by_tensors_is_refused_and_the_weights_are_merged(tmp_path):
    model, _ = fresh(Lion)
    optimizer = KeyedByTensors(model.parameters())
    train(model, optimizer)
    source = tmp_path / "source.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    with pytest.raises(UnsupportedError, match="'state' in param group 0"):
        split(source, tmp_path / "out", SplitOptions(to="dcp"))
    split(source, tmp_path / "out", SplitOptions(to="dcp", weights_only=True))
    reshard.merge(source, tmp_path / "model.safetensors")


def test_of_two_optimizers_both_go_along(tmp_path):
    saved = two_optimizers((0, 4), (1, 2, 3, 5))
    torch.save(saved, tmp_path / "a.pt")
    report = split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="torch"))
    said = [text for text in report.warnings if "2 optimizers are merged into one" in text]
    assert "optimizers.0, optimizers.1" in said[0]
    got = torch.load(tmp_path / "out/checkpoint.pt", weights_only=False)["optimizer"]
    first, second = saved["optimizers"]
    states = [*first["state"].values(), *second["state"].values()]
    assert flat(got["state"]) == flat(dict(enumerate(states)))
    assert [group["lr"] for group in got["param_groups"]] == [1e-3, 0.1]


def test_one_of_two_that_nothing_names_is_not_lost(tmp_path):
    """The first one's (4,) may be any of three: only the second was written, without a word."""
    saved = two_optimizers((0, 1), (4, 5))
    torch.save(saved, tmp_path / "a.pt")
    with reshard.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.manifest.unnamed_optimizers == ("optimizers.0",)
        assert any("optimizers.0" in text for text in checkpoint.manifest.warnings)
    with pytest.raises(IncompleteError, match=r"an optimizer \(optimizers.0\) whose states cannot"):
        split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="dcp"))
    assert "yes, but not assigned to parameters: optimizers.0" in str(reshard.inspect(tmp_path))
    report = reshard.verify(tmp_path)
    assert [check.name for check in report.checks if check.failures] == ["slots"]
    assert report.exit_code == 1


def build_body_and_head():
    """Return a model whose head has biases and weights of the shapes that its body has."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)]
    return nn.Sequential(*layers)


def save_in_parts(state, optimizers, path, form):
    if form == "dcp":
        dcp.save({"model": state, **optimizers}, checkpoint_id=path)
    elif form == "file":
        torch.save({"model": state, "optimizers": list(optimizers.values())}, path)
    else:  # as Accelerate numbers them
        path.mkdir()
        save_file(state, path / "model.safetensors")
        for number, saved in enumerate(optimizers.values()):
            torch.save(saved, path / f"optimizer{f'_{number}' if number else ''}.bin")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("form", ["file", "dcp", "accelerate"])
@pytest.mark.parametrize("kinds", [("AdamW", "AdamW"), ("Muon", "AdamW"), ("AdamW", "SGD")])
def test_optimizers_saved_apart_are_matched_together(tmp_path, form, kinds):
    """The shapes of one alone fit several parameters; both together leave one choice."""
    model = build_body_and_head()
    named = list(model.named_parameters())
    parts = [named[:6], named[6:]]
    if kinds[0] == "Muon":  # takes matrices alone
        parts = [[n for n in named if n[1].ndim == size] for size in (2, 1)]
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}}
    made = [
        getattr(torch.optim, kind)([p for _, p in part], **options.get(kind, {}))
        for kind, part in zip(kinds, parts, strict=True)
    ]
    model(torch.randn(3, 16)).square().sum().backward()
    for optimizer in made:
        optimizer.step()
    saved = {f"opt_{n}": one.state_dict() for n, one in enumerate(made)}
    path = tmp_path / ("a.pt" if form == "file" else "a")
    save_in_parts(model.state_dict(), saved, path, form)
    known = {"model": f"{__name__}:build_body_and_head"} if form == "accelerate" else {}
    with reshard.open(path, **known) as found:
        assert not found.manifest.unnamed_optimizers
        got = {
            (kind, fqn): found.optimizer(kind)[fqn][...]
            for kind, fqn in found.manifest.entries
            if kind != "param"
        }
    expected = {
        (slot, name): value
        for optimizer, part in zip(made, parts, strict=True)
        for name, parameter in part
        for slot, value in optimizer.state[parameter].items()
        if slot != "step"
    }
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in got)


def test_a_state_whose_names_are_no_texts_is_told_of(tmp_path):
    model = torch.nn.Linear(3, 2)
    state = {0: {7: torch.ones(2, 3)}, 1: {7: torch.ones(2)}}
    groups = [{"lr": 0.1, "params": [0, 1]}]
    held = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}
    torch.save(held, tmp_path / "x.pt")
    with pytest.raises(reshard.ReshardError) as raised:
        reshard.inspect(tmp_path / "x.pt")
    assert "structure of its format" not in str(raised.value)


def with_trust(tmp_path, values=(0.25,) * 6):
    """Return an AdamW that keeps a number of each parameter in Python."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    for state, value in zip(optimizer.state.values(), values, strict=True):
        state["trust"] = value
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def plain():
    """Return a model; without arguments, as ``--model`` needs it."""
    return fresh(torch.optim.AdamW)[0]


def alike():
    """Return two layers of one size, as above."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


WRAPPED = {"model": f"{__name__}:plain", "wrap": "none", "world_size": 2}
FLAT = SplitOptions(to="fsdp", state_dict_type="local", **WRAPPED)
ORIG = SplitOptions(to="verl", fsdp_version=1, use_orig_params="fp32", **WRAPPED)


@pytest.mark.parametrize("options", [FLAT, ORIG], ids=["flat", "orig"])
def test_what_is_no_tensor_stands_in_files_of_fsdp_1_too(options, tmp_path):
    source = with_trust(tmp_path)
    split(source, tmp_path / "out", options)
    with reshard.open(tmp_path / "out", model=WRAPPED["model"], wrap="none") as found:
        assert found.manifest.train.non_tensor_state == {name: {"trust": 0.25} for name in found}
    told = {"model": WRAPPED["model"], "wrap": "none"}
    assert not reshard.diff(source, tmp_path / "out", kinds=["train"], **told).train


@pytest.mark.parametrize(
    "options",
    [FLAT, ORIG, SplitOptions(to="colossalai", **WRAPPED)],
    ids=["flat", "orig", "groups"],
)
def test_a_rate_in_a_tensor_goes_along(options, tmp_path):
    model = plain()
    optimizer = with_a_rate_in_a_tensor(model.parameters())
    train(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "source.pt")
    split(tmp_path / "source.pt", tmp_path / "out", options)
    known = {"model": WRAPPED["model"], "wrap": "none"}
    assert not reshard.diff(
        tmp_path / "source.pt", tmp_path / "out", kinds=["train"], **known
    ).train


def test_one_flat_parameter_has_one_of_them(tmp_path):
    source = with_trust(tmp_path, (0.25, 0.5, 0.25, 0.25, 0.25, 0.25))
    with pytest.raises(UnsupportedError, match="keeps a different trust for each member"):
        split(source, tmp_path / "out", FLAT)


@pytest.mark.parametrize(("options", "given"), [(FLAT, True), (ORIG, False)], ids=["flat", "orig"])
def test_a_parameter_that_was_never_stepped_gets_the_step_of_its_flat_one(options, given, tmp_path):
    model = plain()
    model[1].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    report = split(tmp_path / "a.pt", tmp_path / "out", options)
    told = "no state of 1.bias (never stepped): zeros at the step of its flat parameter"
    assert any(told in note for note in report.notes) is given


def test_flat_parameters_that_the_output_does_not_tell_apart_are_named(tmp_path):
    """Units of one size, one of them frozen: FSDP stores only the numbers of the others."""
    model = alike()
    named = [*model.named_parameters()][:2]
    optimizer = torch.optim.AdamW(named)
    train(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    options = replace(FLAT, model=f"{__name__}:alike", wrap="Linear")
    with pytest.raises(DifferentError, match=r"read back: .* some of them are frozen"):
        split(tmp_path / "a.pt", tmp_path / "out", options)


@pytest.mark.parametrize("to", ["deepspeed", "ds-universal"])
def test_where_it_has_no_place_it_is_told_of(to, tmp_path):
    report = split(with_trust(tmp_path), tmp_path / "out", SplitOptions(to=to))
    assert "not copied: 'trust', which the optimizer keeps for each parameter" in report.notes
    seen = reshard.diff(tmp_path / "a.pt", tmp_path / "out", kinds=["train"])
    (value,) = [value for value in seen.train if value.name.startswith("optimizer state: trust")]
    assert (value.a, value.b) == (0.25, None)


def test_a_name_of_a_file_is_one_as_in_merge(tmp_path):
    """It was a directory of that name, with the file in it."""
    source = with_trust(tmp_path)
    report = split(source, tmp_path / "out.pt", SplitOptions(to="torch"))
    assert next(report.lines()).endswith("in 1 file")
    again = plain()
    again.load_state_dict(torch.load(tmp_path / "out.pt")["model"])
    assert reshard.diff(source, tmp_path / "out.pt").same
    for name, to in (("x.pt", "dcp"), ("x.safetensors", "torch")):
        with pytest.raises(UsageError, match="of a file, but --to"):
            split(source, tmp_path / name, SplitOptions(to=to))
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_counter_of_the_group_is_a_tensor_under_deepspeed_too(stage, tmp_path):
    model, optimizer = fresh(StableAdamW)
    train(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(saved, tmp_path / "source.pt")
    out = tmp_path / "zero"
    reshard.split(tmp_path / "source.pt", out, to="deepspeed", zero_stage=stage, world_size=1)
    reshard.split(out, tmp_path / "again", to="torch")
    got = torch.load(tmp_path / "again/checkpoint.pt", weights_only=False)["optimizer"]
    for group in got["param_groups"]:
        assert torch.equal(group["step"], torch.tensor(1, dtype=torch.int32))
        assert group["step"].dtype == torch.int32
    assert not any("step" in state for state in got["state"].values())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (("actor", "model", "actor", "optim"), {"actor.model": 1.0, "critic.model": 2.0}),
        (("models", "actor", "optimizers", "actor"), {"models.actor": 1.0, "models.critic": 2.0}),
        (("", "actor", "", "actor_optim"), {"actor": 1.0, "critic": 2.0}),
        (("run", "actor_model", "run", "optim_actor"), {"run.actor_model": 1.0}),
    ],
)
def test_a_model_has_the_optimizer_near_it(paths, shown, tmp_path):
    """A checkpoint has two models with equal names, and an average that has no optimizer."""
    tree: dict = {"ema": {"weight": torch.zeros(3)}}
    for model, value in (("actor", 1.0), ("critic", 2.0)):
        above, name, above_optimizer, optimizer = (p.replace("actor", model) for p in paths)
        moments = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), value)}
        group = {"lr": 0.1, "params": ["weight"]}
        (tree.setdefault(above, {}) if above else tree)[name] = {"weight": torch.full((3,), value)}
        (tree.setdefault(above_optimizer, {}) if above_optimizer else tree)[optimizer] = {
            "state": {"weight": {**moments, "exp_avg_sq": moments["exp_avg"]}},
            "param_groups": [group],
        }
    dcp.save(tree, checkpoint_id=tmp_path / "run")
    for key, value in shown.items():
        with reshard.open(tmp_path / "run", key=key) as checkpoint:
            assert checkpoint["weight"][...].tolist() == [value] * 3
            assert checkpoint.optimizer("exp_avg")["weight"][...].tolist() == [value] * 3
    with reshard.open(tmp_path / "run", key="ema") as checkpoint:
        assert checkpoint["weight"][...].tolist() == [0.0] * 3
        assert any("the optimizers are left out" in n for n in checkpoint.manifest.warnings)
    reshard.merge(tmp_path / "run", tmp_path / "ema.safetensors", key="ema")
    with pytest.raises(reshard.errors.ReshardError, match="nothing shows which of them"):
        reshard.split(tmp_path / "run", tmp_path / "out", key="ema", to="dcp")


@pytest.mark.parametrize("named", [False, True])
def test_the_joint_state_of_lbfgs_is_refused_and_freezes_nothing(named, tmp_path):
    """Its one state, of all parameters, is stored as that of the first."""
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(2, 3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    held = optimizer.state_dict()
    if named:
        held["param_groups"][0]["params"] = ["weight", "bias"]
        held["state"] = {"weight": held["state"][0]}
    torch.save({"model": model.state_dict(), "optimizer": held}, tmp_path / "source.pt")
    with reshard.open(tmp_path / "source.pt") as checkpoint:
        assert not checkpoint.manifest.frozen
    with pytest.raises(IncompleteError, match="LBFGS keeps one state for all parameters"):
        reshard.split(tmp_path / "source.pt", tmp_path / "out.pt", to="torch")
    reshard.split(tmp_path / "source.pt", tmp_path / "out.pt", to="torch", init_optimizer="none")


def test_param_groups_in_a_dict_are_those_of_an_optimizer_that_is_refused(tmp_path):
    """Distributed Shampoo saves them so; its states looked like further models."""
    slots = {'["step"]': torch.tensor(1), '["block_0", "factor_matrices", 0]': torch.eye(3)}
    optimizer = {"state": {"weight": slots}, "param_groups": {"weight": {"lr": 0.1}}}
    path = tmp_path / "source.pt"
    torch.save({"model": {"weight": torch.ones(3, 2)}, "optimizer": optimizer}, path)
    with reshard.open(path) as checkpoint:
        assert list(checkpoint) == ["weight"]
    with pytest.raises(IncompleteError, match="distributed_state_dict of Distributed Shampoo"):
        reshard.split(path, tmp_path / "out", to="dcp")


def save_with_buffer(path, **also):
    """Save a numbered optimizer and a model with a buffer that has the shape of parameters."""
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    model[1].register_buffer("center", torch.zeros(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save({**state, **also}, path)
    return model


def test_a_live_model_names_what_the_files_number(tmp_path):
    model = save_with_buffer(tmp_path / "run.ckpt")
    assert not formats.read(tmp_path / "run.ckpt").has_optimizer
    manifest = formats.read(tmp_path / "run.ckpt", live=shapes_of(model))
    assert [e.fqn for e in manifest.of_kind("exp_avg")] == [n for n, _ in model.named_parameters()]


def test_the_optimizer_is_not_that_of_lightnings_averaged_weights(tmp_path):
    """They are under state_dict, and the weights that the optimizer trains beside it."""
    trained = save_with_buffer(tmp_path / "other.ckpt").state_dict()
    model = save_with_buffer(tmp_path / "run.ckpt", current_model_state=trained, averaging_state={})
    manifest = formats.read(tmp_path / "run.ckpt", live=shapes_of(model))
    with pytest.raises(IncompleteError, match="holds the averaged weights") as refused:
        live_objects.fill_optimizer_state({}, manifest)
    assert refused.value.remedy == "choose the trained weights: --key current_model_state"
    manifest = formats.read(tmp_path / "run.ckpt", key="current_model_state", live=shapes_of(model))
    assert len(list(manifest.of_kind("exp_avg"))) == len(list(model.parameters()))
    reshard.merge(tmp_path / "run.ckpt", tmp_path / "average.safetensors")


@pytest.mark.parametrize("named", [True, False])
def test_the_name_of_a_group_of_one_parameter_is_that_of_the_parameter(named, tmp_path):
    """Adam-mini makes such groups; a group of another program may have a name of its own."""
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    names = ["second", "first"] if named else ["decay", "first"]
    groups = [
        {"params": [param], "name": n} for param, n in zip((second, first), names, strict=True)
    ]
    optimizer = torch.optim.Adam(groups)
    (first.sum() + 3 * second.sum()).backward()
    optimizer.step()
    model = {"first": first.data, "second": second.data}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with reshard.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.manifest.has_optimizer == named
        for name, param in {"first": first, "second": second}.items() if named else ():
            found = checkpoint.optimizer("exp_avg")[name][...]
            assert torch.equal(found, optimizer.state[param]["exp_avg"])
