"""Fixtures of the crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crashes.tracing import Saver


def _saver() -> Iterator[Saver]:
    with Saver() as running:
        yield running


warm = pytest.fixture(_saver, scope="session", name="warm")
"""The program that runs the task to kill."""

other = pytest.fixture(_saver, scope="session", name="other")
"""Another such program, for two tasks at once."""
