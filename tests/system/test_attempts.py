"""Requests to a store are repeated where that may help; errors of its library are not bugs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import reshard
from reshard.errors import IncompleteError, ReshardError, UsageError
from reshard.system.remote import attempts

URL = "hf://models/org/name"


@pytest.fixture
def count(monkeypatch):
    """Return a function that makes a request that always fails, and counts how often it is made."""
    monkeypatch.setattr(attempts, "_sleep", lambda _seconds: None)

    def count(error):
        made = []

        def request():
            made.append(error)
            raise error

        with pytest.raises(ReshardError) as raised:
            attempts.attempt(URL, request)
        return len(made), raised.value

    return count


@pytest.mark.parametrize("library", ["httpx", "httpx2", "httpcore2", "aiohttp"])
def test_without_a_network_every_attempt_is_made(count, library):
    error = type("ConnectError", (Exception,), {"__module__": library})("no such name")
    made, raised = count(error)
    assert made == attempts.ATTEMPTS
    assert "check the network" in str(raised)


def test_a_busy_store_is_asked_again_for_a_limited_time(count, monkeypatch):
    error = OSError("SlowDown")
    error.response = SimpleNamespace(status_code=503)
    times = iter(range(0, 1000, 10))
    monkeypatch.setattr(attempts.time, "monotonic", lambda: next(times))
    made, raised = count(error)
    assert made > attempts.PATIENCE / 20 + attempts.ATTEMPTS - 2  # two looks at the clock for each
    assert f"after {made} attempts" in str(raised)


def test_a_gated_repository_asks_for_credentials_at_once(count):
    error = OSError("gated")
    error.response = SimpleNamespace(status_code=403)
    made, raised = count(error)
    assert made == 1
    assert attempts.CREDENTIALS in str(raised)


def test_a_repository_that_does_not_exist_is_missing(count):
    error = OSError("no repository")
    error.response = SimpleNamespace(status_code=404)
    made, raised = count(error)
    assert made == 1
    assert isinstance(raised, IncompleteError)


def test_an_error_of_our_own_is_raised_as_it_is():
    def request():
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        attempts.attempt(URL, request)


def test_addresses_that_no_repository_has_are_refused_without_a_request():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UsageError, match="is not a path of this store: Repository id must be"):
        reshard.inspect("hf://gpt2")
    with pytest.raises(UsageError, match=r"is a page of the Hub\n.*hf://ORG/NAME"):
        reshard.inspect("https://huggingface.co/org/name")
