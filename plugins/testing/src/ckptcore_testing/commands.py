"""Runs of commands of Click in the process of a test."""

from __future__ import annotations

import inspect

from click.testing import CliRunner

__all__ = ["runner"]


def runner() -> CliRunner:
    """Return a runner that separates the errors from the output, which Click always does since version 8.2."""
    separates = "mix_stderr" not in inspect.signature(CliRunner).parameters
    return CliRunner() if separates else CliRunner(mix_stderr=False)  # type: ignore[call-arg]
