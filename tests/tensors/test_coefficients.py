"""The factors of an average, as a user gives them."""

from __future__ import annotations

import pytest

from reshard.errors import UsageError
from reshard.tensors.averages.coefficients import parse_weights


@pytest.mark.parametrize("given", ["1e400,0", "1e308,1e308", "nan,1", "1/0,1", "a,b", ""])
def test_factors_that_are_no_numbers_are_refused(given):
    with pytest.raises(UsageError, match="expected numbers separated by commas"):
        parse_weights(given, 2)
