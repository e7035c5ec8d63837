"""Fixtures of the crash tests, for the tests of partial saves."""

from tests.crashes.conftest import warm

__all__ = ["warm"]
