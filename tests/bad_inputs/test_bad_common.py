"""P10: the common table C1-C21 for every array of every operation."""

import pytest

from tests.bad_inputs.case import Case, Recorder, check, table
from tests.bad_inputs.common import common_cases
from tests.bad_inputs.common_out import out_cases
from tests.bad_inputs.valid import VALID

TABLE = table({entry: (*common_cases(entry), *out_cases(entry)) for entry in VALID})


@pytest.mark.parametrize(("entry", "case"), TABLE)
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
