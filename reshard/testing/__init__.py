"""The conformance kit for authors of formats: ``from reshard.testing import check_format``."""

from reshard.testing.formats import Example, check_format

__all__ = ["Example", "check_format"]
