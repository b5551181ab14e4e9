"""pytest: checks kernels in tests.

    @pytest.mark.emulate(schedule="pct:3", seeds=20)
    def test_sum(emulate_check):
        x, out = np.ones(256, np.float32), np.zeros(2, np.float32)
        emulate_check(block_sum, 2, 128, x, out)
        assert out.sum() == 256

A finding fails the test with both source lines and a token for `python -m emulate replay`.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest

_OPTIONS = ("schedule", "seeds", "cc", "strict_wgmma", "resident", "max_steps", "ignore")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        'emulate(schedule="default", seeds=4, **options): schedules, and other options of '
        "`emulate.check`, of the fixture `emulate_check`",
    )


@pytest.fixture
def emulate_check(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`emulate.check` with the options of the test's marker; a finding fails the test."""
    import emulate

    options = _marked(request.node)

    def check(kernel: Any, grid: Any, block: Any, *args: Any, **own: Any) -> Any:
        __tracebackhide__ = True
        asked = {**options, **own}
        if "schedule" in asked:
            asked["schedules"] = asked.pop("schedule")
        return emulate.check(kernel, grid, block, *args, raise_on_finding=True, **asked)

    return check


def _marked(node: Any) -> dict[str, Any]:
    """The options of a test's markers; the closest one wins."""
    options: dict[str, Any] = {}
    for mark in reversed(list(node.iter_markers("emulate"))):
        unknown = sorted(set(mark.kwargs) - set(_OPTIONS))
        if mark.args or unknown:
            wrong = ", ".join(unknown) or "an option without a name"
            raise pytest.UsageError(
                f"mark.emulate: expected options {', '.join(_OPTIONS)}, got {wrong}"
            )
        options.update(mark.kwargs)
    return options


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show findings instead of the frames of the engine."""
    report = yield
    from emulate.findings import FindingError

    if call.excinfo is not None and isinstance(call.excinfo.value, FindingError):
        lines = [str(call.excinfo.value)]
        token = next((f.schedule for f in call.excinfo.value.findings if f.schedule), "")
        if token:
            lines.append(f"again: python -m emulate replay {token} TARGET")
        where = next((e for e in reversed(call.excinfo.traceback) if e.path == item.path), None)
        if where is not None:
            lines.append(f"{where.path}:{where.lineno + 1}: in {item.name}")
        report.longrepr = "\n".join(lines)
    return report
