"""Fixtures of the tests of partial saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crashes.tracing import Saver


@pytest.fixture(scope="session")
def warm() -> Iterator[Saver]:
    """The program that does what is killed."""
    with Saver() as running:
        yield running
