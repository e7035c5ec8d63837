"""The fixtures of the command line's own tests, for those that need the helpers or layouts of others."""

from plugins.tools.tests.cli.conftest import checkpoint, run, run_json

__all__ = ["checkpoint", "run", "run_json"]
