"""Tests for authors of formats and of model families.

formats  the conformance kit for formats: ``from reshard.testing import Example, check_format``
megatron  proof of a model family with Megatron-core: ``python -m reshard.testing.megatron CONFIG``
"""

from reshard.testing.formats import Example, check_format

__all__ = ["Example", "check_format"]
