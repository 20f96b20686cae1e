"""Attributes that are replaced for a while."""

from __future__ import annotations

import pytest

from reshard.system.attributes import replace_attributes


class Library:
    """Stands for a class of another library."""

    def __init__(self):
        self.own = 1

    def load(self):
        return "library"

    @staticmethod
    def save():
        return "library"


def fail(_loader):
    raise ZeroDivisionError


def test_an_object_has_and_inherits_what_it_did_before_the_block():
    loader = Library()
    with replace_attributes(loader, own=2, load=lambda: "reshard", added=3):
        assert (loader.own, loader.load(), loader.added) == (2, "reshard", 3)
    assert vars(loader) == {"own": 1}
    assert loader.load() == "library"


def test_a_class_has_its_own_functions_again_after_an_error():
    before = dict(vars(Library))
    with pytest.raises(ZeroDivisionError), replace_attributes(Library, load=fail, save=fail):
        Library().load()
    assert dict(vars(Library)) == before
    assert Library().save() == "library"


def test_blocks_of_one_attribute_end_in_order():
    loader = Library()
    with replace_attributes(loader, own=2):
        with replace_attributes(loader, own=3):
            assert loader.own == 3
        assert loader.own == 2
    assert loader.own == 1
