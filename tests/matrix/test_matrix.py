"""Every installed framework, layout and storage with every other."""

from __future__ import annotations

from ckptcore_testing import SaveLoadMatrixTests


class TestMatrix(SaveLoadMatrixTests):
    """The matrix of all installed plugins, found by entry points."""
