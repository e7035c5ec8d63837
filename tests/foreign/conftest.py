"""Fixtures of the command line's own tests."""

from plugins.tools.tests.cli.conftest import run, run_json

__all__ = ["run", "run_json"]
