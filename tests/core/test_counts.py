"""The sizes in configs of models."""

import json

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from reshard.containers.json_files import read_json_object
from reshard.core.counts import check_config
from reshard.errors import CorruptError, UsageError
from reshard.model.build import build
from reshard.sizing.sources import find_model

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("num_hidden_layers", v)
            for v in (1e308, "2", 10**9, 0, -1, 2.0, True, float("nan"), 10**30)
        ),
        *(("hidden_size", v) for v in (0, -1, 1 << 40)),
        ("num_attention_heads", 10**6),
        ("num_local_experts", 10**6),
        ("n_layer", 10**9),
        ("num_attention_heads", [4, 10**6]),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
def test_a_size_that_no_model_has_is_refused(tmp_path, key, value):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, key: value}))
    for read in (read_json_object, build, find_model):
        error = UsageError if read is build else CorruptError
        with pytest.raises(error, match=r"config\.json: states .* for"):
            read(str(path))


@pytest.mark.slow
@pytest.mark.judge
def test_the_sizes_of_each_type_of_transformers_are_accepted():
    read = 0
    for model_type in transformers.CONFIG_MAPPING:
        try:
            config = transformers.AutoConfig.for_model(model_type).to_dict()
        except (ValueError, StrictDataclassError):  # a type without defaults
            continue
        check_config(model_type, config)
        read += 1
    assert read > 100
