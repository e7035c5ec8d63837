"""The test suites of storages on servers. All tests are slow, except a fixed sample."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final

import pytest

from tests.servers.samples import quick_sample

_ONE_OF: Final[Mapping[str, int]] = {"test_storage.py": 24, "test_matrix.py": 5, "test_layouts.py": 48}
"""For each suite, the number of tests for each test that is not slow."""

_LONG: Final = (
    "test_any_boxes_of_any_tree_can_be_loaded",
    "test_a_hostile_state_is_an_error",
    "test_a_truncated_object_is_an_error",
    "test_a_corrupted_object_is_an_error",
    "test_inspect_of_damaged_files_raises_only_checkpoint_errors",
    "test_damaged_metadata_files_raise_only_checkpoint_errors",
    "test_many_threads_read_and_write_at_once",
)
"""Tests of the suites that take long on a server."""


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class) -> Generator[None, object, object]:
    """Mark the tests outside of the sample as slow."""
    made = yield
    one_of = _ONE_OF.get(collector.path.name)
    return quick_sample(made, one_of=one_of, long=_LONG) if one_of and isinstance(made, list) else made
