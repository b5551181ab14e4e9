"""P10: the common table C1-C21 for every array of every operation."""

import pytest

from tests.bad_inputs.case import Case, Recorder, check
from tests.bad_inputs.common import common_cases, out_cases
from tests.bad_inputs.valid import VALID

TABLE = [
    pytest.param(api, case, id=f"{api}-{case.id}")
    for api in VALID
    for case in (*common_cases(api), *out_cases(api))
]


@pytest.mark.parametrize(("api", "case"), TABLE)
def test_refused(api: str, case: Case, recorder: Recorder) -> None:
    check(api, case, recorder)
