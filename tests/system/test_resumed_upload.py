"""An upload that was cut off goes on: what the store has is not sent again, and cannot lie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import reshard
from reshard.engine.move import receipts
from reshard.engine.output import lease
from reshard.errors import DifferentError, ExistsError, ReshardError, UsageError
from reshard.system.remote import attempts
from tests.support.object_stores import EXAMPLE, bucket, calm, contents, started  # noqa: F401
from tests.support.programs import run_python

OUT = "s3://bucket/out/dcp"
PLACE = "bucket/out/.dcp.partial"
PROGRAM = """
import os, signal, sys
import reshard
from reshard.engine.move import receipts
from reshard.engine.output import publish

receipts.MIN_BYTES = 1
number = 0

def dying(ends, act):
    def acted(*words):
        global number
        result = act(*words)
        number += ends(*words)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return acted

if sys.argv[1] == "sending":
    receipts.Receipts.keep = dying(lambda *_: True, receipts.Receipts.keep)
else:
    publish._copy = dying(lambda *_: True, publish._copy)
reshard.split(sys.argv[2], sys.argv[3], to="dcp", workers=1)
"""


@pytest.fixture(autouse=True)
def every_file_counts(monkeypatch, files):
    monkeypatch.setattr(receipts, "MIN_BYTES", 1)
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    yield
    if files.find("bucket/out"):
        files.rm("bucket/out", recursive=True)


def split(**options):
    return reshard.split(EXAMPLE, OUT, to="dcp", workers=1, **options)


def sent(proxy):
    """Return names of the files that were sent to the hidden place."""
    parts = [path.split("/") for method, path in proxy.seen if method == "PUT"]
    return {words[-1] for words in parts if words[-2].startswith("output-")}


def cut_off(proxy, **options):
    """Run until the store is lost at the third of four files; return the output."""

    def fault(method, path, _number):
        if method != "PUT" or not path.endswith("/__2_0.distcp"):
            return None
        for _ in range(5000):  # until the first two are there, with their receipts
            if sum(method == "PUT" and "/sent-" in path for method, path in [*proxy.seen]) >= 2:
                return 500
            time.sleep(0.02)
        raise AssertionError("the first two files do not come")

    proxy.fault = fault
    with pytest.raises(ReshardError) as caught:
        split(**options)
    proxy.reset()
    return str(caught.value)


def killed(where):
    words = [sys.executable, "-c", PROGRAM, where, str(EXAMPLE), OUT]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_run_goes_on_and_sends_only_what_is_not_there(files, proxy, whole):
    said = cut_off(proxy, resume=True)
    assert "nothing was written to s3://bucket/out/dcp; " in said
    assert "are kept in s3://bucket/out/.dcp.partial; pass --resume to continue" in said
    assert contents(files, "bucket/out/dcp") == {}
    assert not [name for name in files.find(PLACE) if "/lock-" in name]
    kept = {name.rsplit("/", 1)[-1] for name in files.find(PLACE) if "/sent-" in name}
    assert {"__0_0.distcp", "__1_0.distcp"} <= kept  # and as far as the others came
    assert "__2_0.distcp" not in kept
    report = split(resume=True)
    read = [path for method, path in proxy.seen if method == "GET" and "/sent-" in path]
    assert sorted(path.rsplit("/", 1)[-1] for path in read) == sorted(kept), "each is fetched once"
    assert "__2_0.distcp" in sent(proxy)
    assert not kept & sent(proxy)
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")
    assert report.verified
    assert any(line.startswith("resumed") for line in report.lines())


def test_resume_with_nothing_to_go_on_with_begins(files, whole):
    report = split(resume=True)
    assert contents(files, "bucket/out/dcp") == whole
    assert not any(line.startswith("resumed") for line in report.lines())


def test_without_resume_nothing_stays_and_what_stayed_goes(files, proxy, whole):
    assert "--resume" not in cut_off(proxy)
    assert files.find("bucket/out") == []
    cut_off(proxy, resume=True)
    held = {name for name in files.find(PLACE) if "/output-" in name}
    assert len(held) >= 2
    report = split()
    assert any("of an interrupted run were removed from" in line for line in report.lines())
    assert "__0_0.distcp" in sent(proxy)
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


@pytest.mark.parametrize("where", ["sending", "copying"])
def test_a_killed_run_is_gone_on_with(files, proxy, whole, where):
    killed(where)
    assert [name for name in files.find(PLACE) if "/lock-" in name]
    assert ".metadata" not in contents(files, "bucket/out/dcp")
    if where == "copying":
        assert 0 < len(contents(files, "bucket/out/dcp")) < len(whole)
        with pytest.raises(ExistsError, match="exists and is not empty"):
            split()
    proxy.seen.clear()
    report = split(resume=True)
    assert sent(proxy) < {*whole}
    assert any(line.startswith("resumed") for line in report.lines())
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


SIGNALLED = """
import os, signal, sys
from reshard.cli import main
from reshard.engine.output import publish
from reshard.system.remote import objects

def struck(where, name):
    act = getattr(where, name)
    def acted(*words):
        result = act(*words)
        if sys.argv[0] in str(words):
            os.kill(os.getpid(), signal.SIGTERM)
        return result
    setattr(where, name, acted)

sys.argv.pop(0)
if sys.argv[0] == "old.safetensors":
    struck(objects, "remove")
else:
    struck(publish, "_copy")
main()
"""


def signalled(at, *words):
    """Run the command line, with a signal once something was done with a file of this name."""
    words = [sys.executable, "-c", SIGNALLED, at, *map(str, words)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    return done.stderr


def test_a_signal_while_the_last_file_gets_its_name_takes_nothing_away(files, whole):
    said = signalled("out/dcp/.metadata", "split", EXAMPLE, OUT, "--to", "dcp")
    assert "interrupted; s3://bucket/out/dcp was already written completely" in said
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


def test_a_signal_while_what_is_replaced_is_removed_does_not_take_the_new_too(files):
    files.pipe_file("bucket/out/dcp/old.safetensors", b"old")
    merge = ["merge", EXAMPLE, OUT, "--overwrite"]
    said = signalled("old.safetensors", *merge)
    assert "with --resume to publish it" in said
    reshard.merge(EXAMPLE, OUT, overwrite=True, resume=True)
    made = contents(files, "bucket/out/dcp")
    assert "model.safetensors" in made
    assert "old.safetensors" not in made
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


def test_what_others_put_there_meanwhile_is_not_taken_for_half_an_output(files):
    files.pipe_file(f"{PLACE}/moving", b"")
    files.pipe_file("bucket/out/dcp/notes.txt", b"mine")
    with pytest.raises(ExistsError, match="was created by another process"):
        split(resume=True)
    assert files.cat_file("bucket/out/dcp/notes.txt") == b"mine"


def test_what_can_neither_be_copied_nor_taken_back_is_said_and_put_in_place_later(
    files, proxy, whole
):
    def fault(method, path, _number):
        copying = method == "PUT" and path.startswith("/bucket/out/dcp/")
        return 500 if "?delete" in path or (copying and ".metadata" in path) else None

    proxy.fault = fault
    with pytest.raises(
        ReshardError, match=r"could not be removed again.*(?s:.)*with --resume to publish it"
    ):
        split()
    proxy.reset()
    assert contents(files, "bucket/out/dcp").keys() == {*whole} - {".metadata"}
    split(resume=True)
    assert not sent(proxy)
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


def test_another_job_is_refused_and_nothing_is_removed(files, proxy):
    cut_off(proxy, resume=True)
    held = contents(files, PLACE)
    with pytest.raises(UsageError, match="cannot be resumed: on_overflow has changed"):
        split(resume=True, on_overflow="clamp")
    assert contents(files, PLACE) == held


@pytest.mark.parametrize("change", ["other bytes", "removed", "a torn receipt"])
def test_a_file_that_is_not_as_it_was_is_sent_again(files, proxy, whole, change):
    cut_off(proxy, resume=True)
    (name,) = (name for name in files.find(PLACE) if "/output-" in name and "__0_0" in name)
    if change == "other bytes":
        files.pipe_file(name, bytes(files.info(name)["size"]))
    elif change == "removed":
        files.rm_file(name)
    else:
        receipt = name.replace("/output-", "/sent-")
        files.pipe_file(receipt, files.cat_file(receipt)[:-2])
    split(resume=True)
    assert "__0_0.distcp" in sent(proxy)
    assert "__1_0.distcp" not in sent(proxy)
    assert contents(files, "bucket/out/dcp") == whole


def test_what_was_not_read_back_is_not_trusted_by_a_run_that_reads_back(files, proxy, whole):
    cut_off(proxy, resume=True, verify=False)
    split(resume=True)
    assert "__0_0.distcp" in sent(proxy)
    assert contents(files, "bucket/out/dcp") == whole


def test_a_store_that_holds_other_bytes_leaves_nothing(files, proxy, monkeypatch):
    from reshard.engine.output import uploads

    def differ(_made, sent, _stop):
        raise DifferentError(sent, "differs")

    monkeypatch.setattr(uploads, "check_uploaded", differ)
    with pytest.raises(DifferentError):
        split(resume=True)
    assert files.find("bucket/out") == []


def sign(files, name, host, pid=4711):
    files.pipe_file(f"{PLACE}/lock-{name}", b'{"pid": %d, "host": "%s"}' % (pid, host.encode()))


def test_two_processes_do_not_write_one_destination(files, proxy, whole, monkeypatch):
    cut_off(proxy, resume=True)
    sign(files, "theirs", "node3")
    held = contents(files, PLACE)
    for resume in (True, False):
        with pytest.raises(ExistsError, match="is being written by process 4711 on node3"):
            split(resume=resume)
    assert contents(files, PLACE) == held
    monkeypatch.setattr(lease, "PATIENCE", -1)  # so long ago
    split(resume=True)
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


def test_a_process_of_this_machine_that_is_no_more_keeps_nobody_out(files, whole):
    gone = run_python("-c", "", check=True)
    assert gone.returncode == 0
    pid = int(subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"]))
    sign(files, "theirs", os.uname().nodename, pid)
    split()
    assert contents(files, "bucket/out/dcp") == whole


def test_a_run_that_was_taken_over_does_not_publish(files, monkeypatch):
    def written(*words):
        outcome = finish(*words)
        for name in files.find(PLACE):
            if "/lock-" in name:
                files.rm_file(name)
        return outcome

    finish = receipts.Receipts.finish
    monkeypatch.setattr(receipts.Receipts, "finish", written)
    with pytest.raises(ExistsError, match="was taken over by another process"):
        split()
    assert contents(files, "bucket/out/dcp") == {}


def test_a_sign_of_life_is_given_again_and_again(files, monkeypatch):
    from reshard.system.paths import as_path

    monkeypatch.setattr(lease, "BEAT", 0.05)
    place = as_path("s3://bucket/out/.dcp.partial")
    held = lease.Lease(place, as_path(OUT))
    held.acquire()
    (name,) = files.find(PLACE)
    files.pipe_file(name, b"old")
    for _ in range(2000):
        time.sleep(0.05)
        if files.cat_file(name) != b"old":
            break
    assert b'"pid"' in files.cat_file(name)
    held.check()
    held.release()
    assert files.find(PLACE) == []
