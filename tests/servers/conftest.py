"""The suites of all storages on servers: most of it is slow, and a fixed sample is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.servers.samples import mark_slow

_ONE_OF: Final[Mapping[str, int]] = {"test_storage.py": 24, "test_matrix.py": 5}
"""By suite, how many tests there are for each that stays quick."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the sample."""
    for name, one_of in _ONE_OF.items():
        mark_slow(items, Path(__file__).parent / name, one_of=one_of)
