"""The suites of all storages on servers: most of it is slow, and a fixed sample is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.servers.samples import mark_slow

_ONE_OF: Final[Mapping[str, int]] = {"test_storage.py": 24, "test_matrix.py": 5, "test_layouts.py": 48}
"""By suite, how many tests there are for each that stays quick."""

_LONG: Final = (
    "test_any_boxes_of_any_tree_come_back",
    "test_a_hostile_state_is_an_error",
    "test_a_truncated_object_is_an_error",
    "test_a_corrupted_object_is_an_error",
    "test_inspect_of_damaged_files_is_an_error_at_most",
    "test_damaged_marks_are_an_error_at_most",
    "test_many_threads_do_many_things",
)
"""Tests of the suites that take long on a server."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the sample."""
    for name, one_of in _ONE_OF.items():
        mark_slow(items, Path(__file__).parent / name, one_of=one_of, long=_LONG)
