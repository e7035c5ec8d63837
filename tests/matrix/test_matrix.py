"""Every installed framework, layout and storage with every other."""

from __future__ import annotations

from ckptcore_testing import SaveLoadMatrixTests


class TestMatrix(SaveLoadMatrixTests):
    """What is installed is found by entry points; a new plugin needs no edit here."""
