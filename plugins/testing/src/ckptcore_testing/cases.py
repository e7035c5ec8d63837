"""`check_each` runs a check with many values inside one test; `refused` returns the message of an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from ckptcore.errors import CheckpointError


def check_each(check: Callable[..., None], *values: Iterable[object]) -> None:
    """Run a check with each combination of values, and raise all failures together.

    Separate tests would take longer to collect and to report than to run.

    Raises:
        AssertionError: if a check fails. Its cause is a group of all failures, each with a note about its values.
    """
    failures: list[BaseException] = []
    for chosen in itertools.product(*values):
        try:
            check(*chosen)
        except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001  # raised again, below
            failure.add_note(
                f"with {', '.join([getattr(value, 'name', None) or ascii(value)[:100] for value in chosen])}"
            )
            failures.append(failure)
    if failures:
        group = BaseExceptionGroup("each with a note of its values", failures)
        raise AssertionError(f"{len(failures)} cases failed") from group


def refused(call: Callable[[], object], *texts: str, error: type[Exception] = CheckpointError) -> str:
    """Return the message of the error of a call. Fail unless the message contains all texts."""
    with pytest.raises(error) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    return str(caught.value)
