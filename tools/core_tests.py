"""Skip tests that need a library or distribution that is not installed: ``pytest -p tools.core_tests``.

This plugin of pytest is for `make test-core`, whose environment has only the core. Where all distributions are
installed, a missing library is a failure.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from ckptcore.distributions import DISTRIBUTIONS
from ckptcore.errors import CheckpointError


def needs(error: BaseException) -> str:
    """Return the package or the command that an error asks for; empty if it asks for none."""
    if isinstance(error, ModuleNotFoundError):
        return error.name or ""
    if isinstance(error, BaseExceptionGroup):  # the errors of the ranks of a job
        return next((name for each in error.exceptions if (name := needs(each))), "")
    hints = [distribution.hint for distribution in DISTRIBUTIONS if isinstance(error, CheckpointError)]
    return next((hint for hint in hints if hint in str(error)), "")


def _skips() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if name := needs(error):
            pytest.skip(f"needs {name}, which is not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Skip tests whose fixtures need what is not installed."""
    return (yield from _skips())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip tests that need what is not installed."""
    return (yield from _skips())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that import what is not installed."""
    report = yield
    cause = report.call.excinfo.value if report.outcome == "failed" and report.call and report.call.excinfo else None
    while cause is not None and not needs(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: needs {needs(cause)}, which is not installed")
    return report
