"""Every combination of installed frameworks, layouts and storages."""

from __future__ import annotations

from ckptcore_testing import SaveLoadMatrixTests


class TestMatrix(SaveLoadMatrixTests):
    """The matrix of all installed plugins, which entry points name."""
