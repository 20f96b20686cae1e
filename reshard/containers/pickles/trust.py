"""Names that a checkpoint's pickle may contain: expected ones, unknown ones, and attacks.

No name is ever imported or called. The lists decide only what the user sees: a name that is useful
only to run code is refused at once; a name that no known framework writes is reported, and a
conversion continues only with ``--allow-pickle NAME``.
"""

from __future__ import annotations

import re
from functools import cache

_RUNS_CODE_MODULES = frozenset(
    """
    os posix nt io _io subprocess sys shutil socket pty commands runpy code codeop importlib imp
    pkgutil
    ctypes multiprocessing threading asyncio webbrowser pip pickle _pickle dill cloudpickle marshal
    types inspect gc signal platform tempfile timeit pdb bdb trace cProfile profile urllib http
    ftplib smtplib requests operator
    """.split()
)
_RUNS_CODE_BUILTINS = frozenset(
    """
    eval exec compile open __import__ getattr setattr delattr globals locals vars apply execfile
    input breakpoint exit quit map filter help memoryview type
    """.split()
)
_RUNS_CODE_NAMES = frozenset(
    """
    torch.load torch.hub.load torch.jit.load torch.serialization.load
    torch.storage._load_from_bytes torch.utils.cpp_extension.load numpy.load
    numpy.core.multiarray.fromfile functools.partial functools.reduce
    """.split()
)

# Protocol 2 writes a nested class as getattr(outer, "Inner").
NESTED_CLASSES = frozenset(
    ("torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState",)
)
# The calls that Transformer Engine's quantised tensors are pickled as (2.x ``pytorch/tensor/``).
_QUANTISED = r"transformer_engine\.[\w.]+\.(\w+Tensor)\._make_in_reduce_ex"

# First part of a dotted name -> pattern of the rest, compiled at the first use.
_FRAMEWORK = r"([\w.]+\.)?_?[A-Z]\w*"
_EXPECTED = {
    "torch": r"""
        (\w*Storage|Size|Tensor|device|dtype|layout|storage\.\w+Storage)
        | (b?float\d+\w*|double|half|u?int\d+|bool|complex\d+|qu?int\d+|strided|sparse_\w+)
        | _utils\._rebuild_\w+
        | _tensor\._rebuild_from_type_v2
        | nn\.parameter\.(Parameter|Buffer)
        | serialization\._get_layout
        | torch_version\.TorchVersion
        | distributed\.([\w.]+\.)?_?[A-Z]\w*
        | distributed\.remote_device\._remote_device
        | utils\.data\.([\w.]+\.)?([A-Z]\w*|default_collate)
        """,
    "collections": "OrderedDict|defaultdict|Counter|deque",
    "builtins": """
        set|frozenset|list|dict|tuple|bytearray|bytes|complex|slice|range
        |int|float|str|bool|object
        """,
    "_codecs": "encode",
    "copyreg": "_reconstructor",
    "_io": "BytesIO",
    "numpy": r"""
        (ndarray|dtype|u?int\d+|float\d+|bool_?)
        | _?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)
        | random\._pickle\.__\w+_ctor | random\._\w+\.[A-Z]\w*
        | random\.bit_generator\.(__pyx_unpickle_)?SeedSequence
        | dtypes\.\w+
        """,
    # Megatron-LM's `exit_signal`. Python before 3.11 writes its members by name (`_convert_` in
    # Lib/enum.py), for example signal.SIGTERM; the functions of this module are in lower case.
    "signal": "Signals|SIG[A-Z0-9]+",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "datetime": "datetime|timedelta|date|timezone",
    "pathlib": r"(_local\.)?(Pure)?(Posix|Windows)?Path",
    "omegaconf": _FRAMEWORK,
    "deepspeed": rf"""
        {_FRAMEWORK} | (utils\.tensor_fragment|runtime\.bf16_optimizer)\.fragment_address
        """,
    **dict.fromkeys(
        """
        transformers accelerate megatron lightning pytorch_lightning trl peft composer olmo
        olmo_core torchao torchtune torchdata litgpt litdata llmfoundry streaming galore_torch
        apollo_torch
        """.split(),
        _FRAMEWORK,
    ),
}


def find_quantised_class(name: str) -> str:
    """Return Transformer Engine's class whose tensors a global builds; empty if it builds none."""
    match = re.fullmatch(_QUANTISED, name) if name.startswith("transformer_engine.") else None
    return match[1] if match else ""


def runs_code(name: str) -> bool:
    """Return whether a dotted name is useful only to an attack: it runs code or opens files."""
    if name in _RUNS_CODE_NAMES:
        return True
    module, *attributes = name.split(".")
    if module == "builtins":
        return bool(attributes) and attributes[0] in _RUNS_CODE_BUILTINS
    # Some harmless names of these modules are expected: types.SimpleNamespace, signal.Signals.
    return module in _RUNS_CODE_MODULES and not is_expected(name)


def is_expected(name: str) -> bool:
    """Return whether the frameworks that reshard knows write this name into their checkpoints."""
    top, _, rest = name.partition(".")
    return top in _EXPECTED and _compile_rest(top).fullmatch(rest) is not None


@cache
def _compile_rest(top: str) -> re.Pattern[str]:
    return re.compile(_EXPECTED[top], re.VERBOSE)


def list_unknown(names: set[str]) -> tuple[str, ...]:
    """Return the names that no known framework writes, sorted."""
    return tuple(sorted(name for name in names if not is_expected(name)))
