"""A runner of Click commands in the process of a test."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner


def runner() -> CliRunner:
    """Return a runner that separates stderr from stdout, as Click 8.2 and later always do."""
    separates = "mix_stderr" not in inspect.signature(CliRunner).parameters
    return CliRunner() if separates else _Separate(mix_stderr=False)  # type: ignore[call-arg]


class _Separate(CliRunner):
    @contextmanager
    def isolation(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Write errors immediately, because Click 8.1 does not flush them."""
        with super().isolation(*args, **options) as streams:
            if isinstance(sys.stderr, io.TextIOWrapper):
                sys.stderr.reconfigure(write_through=True)
            yield streams
