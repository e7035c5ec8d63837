"""The suites of all storages on servers: most of it is slow, and a fixed sample is not."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final

import pytest

from tests.servers.samples import quick_sample

_ONE_OF: Final[Mapping[str, int]] = {"test_storage.py": 24, "test_matrix.py": 5, "test_layouts.py": 48}
"""By suite, how many tests there are for each that stays quick."""

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
    """Choose the sample."""
    made = yield
    one_of = _ONE_OF.get(collector.path.name)
    return quick_sample(made, one_of=one_of, long=_LONG) if one_of and isinstance(made, list) else made
