"""`reshard serve`: a run of real DeepSpeed as a model of the Hub, without files on a disk."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection, IncompleteRead

import pytest
import safetensors.torch
import torch

import reshard
from reshard.commands.open_files import open_files
from reshard.commands.serve import ServeOptions, create_server
from tests.support.programs import LIMIT_S
from tests.support.sample_tensors import same

pytestmark = pytest.mark.slow
SOURCE = "hf_z3_tied"
LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("any/name", cache_dir=sys.argv[1])
torch.save(model.state_dict(), sys.argv[2])
"""


@contextmanager
def serving(source, **chosen):
    """Serve a source on a free port; yield the address and the lines for the user."""
    said = []
    options = ServeOptions(port=0, **chosen)
    with (
        open_files(source, options) as files,
        create_server(files, options, said.append) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address, said, server
        server.shutdown()


def ask(address, path, method="GET", **headers):
    """Return the status and the content of an answer."""
    with closing(HTTPConnection(*address[:2], timeout=LIMIT_S)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


@pytest.fixture
def run(made):
    return made / SOURCE / "run"


@pytest.fixture
def merged(run, tmp_path):
    out = tmp_path / "merged"
    reshard.merge(run, out)
    return out


def test_transformers_loads_it_from_the_address_of_a_hub(run, merged, tmp_path):
    with serving(run) as ((host, port), _, _):
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://{host}:{port}",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        command = [sys.executable, "-c", LOADS, str(tmp_path / "cache"), str(tmp_path / "got.pt")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    wanted = safetensors.torch.load_file(merged / "model.safetensors")
    assert wanted
    for fqn, value in wanted.items():
        assert same(got[fqn], value), fqn


def test_every_file_has_the_bytes_that_merge_writes(run, merged):
    with serving(run) as (address, _, _):
        listed = json.loads(ask(address, "/")[1])
        assert {each["name"] for each in listed} == {path.name for path in merged.iterdir()}
        for path in merged.iterdir():
            data = path.read_bytes()
            assert ask(address, f"/{path.name}")[1] == data
            for first, last in ((0, 0), (5, 99), (len(data) - 7, len(data) - 1)):
                answer = ask(address, f"/{path.name}", Range=f"bytes={first}-{last}")
                assert answer == (206, data[first : last + 1])
            assert ask(address, f"/{path.name}", Range="bytes=-3") == (206, data[-3:])


def test_what_is_refused(run):
    with serving(run, token="secret") as (address, _, _):
        assert ask(address, "/")[0] == 401
        assert ask(address, "/", Authorization="Bearer other")[0] == 401
        allowed = {"Authorization": "Bearer secret"}
        assert ask(address, "/", **allowed)[0] == 200
        for path in ("/nothing", "/../../etc/passwd", "/%2e%2e/latest"):
            assert ask(address, path, **allowed)[0] == 404
        assert ask(address, "/config.json", Range="bytes=99999999-", **allowed)[0] == 416
        assert ask(address, "/config.json", method="POST", **allowed)[0] == 501


def test_a_new_token_is_made_for_other_machines(run):
    with serving(run, host="0.0.0.0") as ((_, port), _, server):
        assert len(server.token) > 20
        assert ask(("127.0.0.1", port), "/")[0] == 401


def test_a_checkpoint_that_disappears_ends_the_response(copied):
    run = copied(SOURCE)
    with serving(run) as (address, said, server):
        for path in run.rglob("*_optim_states.pt"):
            os.truncate(path, 100)
        for path in run.rglob("*_model_states.pt"):
            os.truncate(path, 100)
        with pytest.raises(IncompleteRead):
            ask(address, "/model.safetensors")
        assert any("the file became shorter" in line for line in said)
        assert ask(address, "/config.json")[0] == 200
        assert server.token == ""


def test_a_layout_of_split_is_served_too(run, tmp_path):
    reshard.split(run, tmp_path / "dcp", to="dcp", world_size=2)
    with serving(run, to="dcp", world_size=2) as (address, _, _):
        for path in (tmp_path / "dcp").iterdir():
            assert ask(address, f"/{path.name}")[1] == path.read_bytes()


def test_a_client_that_is_killed_does_not_disturb_two_others(run, merged):
    wanted = (merged / "model.safetensors").read_bytes()
    with serving(run) as (address, said, _):
        killed = socket.create_connection(address[:2])
        killed.sendall(b"GET /model.safetensors HTTP/1.1\r\nHost: here\r\n\r\n")
        killed.recv(100)
        # As the kernel does for a process that is killed with unread data: a reset.
        killed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        killed.close()
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda _: ask(address, "/model.safetensors"), range(2))
            assert list(answers) == [(200, wanted)] * 2
        assert said == []


def test_a_server_that_is_killed_leaves_no_complete_response(tmp_path):
    run = tmp_path / "run.safetensors"  # larger than what the kernel takes of an answer
    safetensors.torch.save_file({"weight": torch.arange(16 << 20, dtype=torch.int32)}, run)
    command = [sys.executable, "-m", "reshard", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        host, port = re.search(r"http://(.+):(\d+)/", server.stderr.readline()).groups()
        with closing(HTTPConnection(host, int(port), timeout=LIMIT_S)) as client:
            client.request("GET", "/model.safetensors")
            with client.getresponse() as answer:
                assert int(answer.headers["Content-Length"]) > 64 << 20
                answer.read(100)
                server.kill()
                server.wait()
                with pytest.raises((IncompleteRead, ConnectionResetError)):
                    answer.read()
