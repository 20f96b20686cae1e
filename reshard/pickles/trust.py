"""Which names a checkpoint's pickle may carry: expected ones, unknown ones, and attacks.

Nothing that a pickle names is ever imported or called. The lists decide only what the user is
told: a name whose only use is to run code is refused at once; a name that no framework writes is
reported, and a conversion goes on only after ``--allow-pickle NAME``.
"""

from __future__ import annotations

import re

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

# Protocol 2 names a nested class as getattr(outer, "Inner").
NESTED_CLASSES = frozenset(
    ("torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState",)
)

_EXPECTED = re.compile(
    r"""
    torch\.(\w*Storage|Size|Tensor|device|dtype|layout|storage\.\w+Storage)
    | torch\.(b?float\d+\w*|double|half|u?int\d+|bool|complex\d+|qu?int\d+|strided|sparse_\w+)
    | torch\._utils\._rebuild_\w+
    | torch\._tensor\._rebuild_from_type_v2
    | torch\.nn\.parameter\.(Parameter|Buffer)
    | torch\.serialization\._get_layout
    | torch\.torch_version\.TorchVersion
    | torch\.distributed\.([\w.]+\.)?_?[A-Z]\w*
    | torch\.distributed\.remote_device\._remote_device
    | collections\.(OrderedDict|defaultdict|Counter|deque)
    | builtins\.(set|frozenset|list|dict|tuple|bytearray|bytes|complex|slice|range)
    | builtins\.(int|float|str|bool|object)
    | _codecs\.encode | copyreg\._reconstructor | _io\.BytesIO
    | numpy\.(ndarray|dtype|u?int\d+|float\d+|bool_?)
    | numpy\._?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)
    | numpy\.random\._pickle\.__\w+_ctor | numpy\.random\._\w+\.[A-Z]\w*
    | numpy\.dtypes\.\w+
    | signal\.Signals | argparse\.Namespace | types\.SimpleNamespace
    | datetime\.(datetime|timedelta|date|timezone)
    | pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path
    | omegaconf\.([\w.]+\.)?[A-Z]\w*
    | (deepspeed|transformers|accelerate|megatron|lightning|pytorch_lightning|trl|peft)
      \.([\w.]+\.)?[A-Z]\w*
    | deepspeed\.(utils\.tensor_fragment|runtime\.bf16_optimizer)\.fragment_address
    """,
    re.VERBOSE,
)


def runs_code(name: str) -> bool:
    """Whether a dotted name serves an attacker only: it runs code or opens files."""
    if name in _RUNS_CODE_NAMES:
        return True
    module, *attributes = name.split(".")
    if module == "builtins":
        return bool(attributes) and attributes[0] in _RUNS_CODE_BUILTINS
    return module in _RUNS_CODE_MODULES and not expected(name)


def expected(name: str) -> bool:
    """Whether the frameworks that reshard knows write this name into their checkpoints."""
    return _EXPECTED.fullmatch(name) is not None


def unknown(names: set[str]) -> tuple[str, ...]:
    """The names that no known framework writes, sorted."""
    return tuple(sorted(name for name in names if not expected(name)))
