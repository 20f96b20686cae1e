"""`reshard merge RUN hf://org/name`: huggingface_hub commits files without a copy on a disk."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zipfile import ZipFile

import pytest

import reshard
from reshard.commands.merge.upload import find_repository
from reshard.errors import UsageError

pytestmark = pytest.mark.slow
SOURCE = "hf_z3_tied"
SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """The part of the Hub's interface that an upload uses, for one repository ``org/name``."""

    daemon_threads = True

    def __init__(self, present=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.present = list(present)
        self.blobs, self.committed, self.parent = {}, {}, None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        """Print nothing."""

    def read(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, document, status=200):
        data = json.dumps(document).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if not self.path.startswith("/api/models/org/name"):
            self.answer({"error": "Repository not found"}, 404)
            return
        siblings = [{"rfilename": name} for name in self.server.present]
        self.answer({"id": "org/name", "sha": SHA, "private": False, "siblings": siblings})

    def do_PUT(self):
        data, oid = self.read(), self.path.rpartition("/")[2]
        is_right = hashlib.sha256(data).hexdigest() == oid
        self.server.blobs[oid] = data
        self.answer({}, 200 if is_right else 400)

    def do_POST(self):
        data, hub = self.read(), self.server
        if self.path.startswith("/api/models/org/name/preupload/main"):
            self.answer({"files": [self.mode(file) for file in json.loads(data)["files"]]})
        elif self.path == "/org/name.git/info/lfs/objects/batch":
            self.answer({"objects": [self.action(each) for each in json.loads(data)["objects"]]})
        elif self.path.startswith("/api/models/org/name/commit/main"):
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.parent = value["parentCommit"]
                elif line["key"] == "lfsFile":
                    hub.committed[value["path"]] = hub.blobs[value["oid"]]
                else:
                    hub.committed[value["path"]] = base64.b64decode(value["content"])
            self.answer({"commitUrl": f"{hub.url}/org/name/commit/{SHA}", "commitOid": SHA})
        else:
            self.answer({"error": self.path}, 404)

    @staticmethod
    def mode(file):
        kind = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": kind, "shouldIgnore": False}

    def action(self, each):
        upload = {"href": f"{self.server.url}/upload/{each['oid']}", "header": {}}
        return {**each, "actions": {"upload": upload}}


@contextmanager
def hub(**how):
    with Hub(**how) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def merge(server, run, *options, to="hf://org/name"):
    """Run the command with the server as the Hub; huggingface_hub reads the address at import."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-m", "reshard", "merge", str(run), to, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_repository_gets_the_files_that_merge_writes(made, tmp_path):
    run = made / SOURCE / "run"
    reshard.merge(run, tmp_path / "merged")
    with hub() as server:
        done = merge(server, run)
        assert done.returncode == 0, done.stderr
        assert "hf://org/name" in done.stdout
        wanted = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
        assert server.committed == wanted
        assert server.parent == SHA


def test_existing_files_are_replaced_only_on_request(made):
    run = made / SOURCE / "run"
    with hub(present=["config.json", "README.md"]) as server:
        refused = merge(server, run)
        assert refused.returncode == UsageError.exit_code
        assert "already contains config.json" in refused.stderr
        assert not server.committed
        assert merge(server, run, "--overwrite").returncode == 0
        assert "config.json" in server.committed


def test_what_is_refused_changes_nothing(made, copied):
    run = made / SOURCE / "run"
    with hub() as server:
        unknown = merge(server, run, to="hf://org/other")
        assert unknown.returncode == 4
        assert "hf repo create" in unknown.stderr
        assert merge(server, run, "--dry-run").returncode == 0
        damaged = copied(SOURCE)
        for path in damaged.rglob("*_optim_states.pt"):
            flip_bits(path)
        broken = merge(server, damaged)
        assert broken.returncode == 3, broken.stderr
        assert not server.committed


def flip_bits(path):
    """Flip a bit in each of the largest records of a file of ``torch.save``."""
    records = ZipFile(path).infolist()
    largest = max(record.file_size for record in records)
    data = bytearray(path.read_bytes())
    for record in records:
        if record.file_size == largest:
            data[record.header_offset + largest // 2] ^= 1
    path.write_bytes(data)


def test_names_of_repositories():
    named = find_repository("hf://org/name@branch")
    assert (named.name, named.revision) == ("org/name", "branch")
    for wrong in ("hf://name", "hf://org/name/file.safetensors"):
        with pytest.raises(UsageError, match="is not hf://organization/name"):
            find_repository(wrong)
