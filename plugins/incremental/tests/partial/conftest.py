"""Fixtures of the tests of crashes."""

from tests.crashes.conftest import warm

__all__ = ["warm"]
