"""Conformance tests of the layout `deltas`, for full versions."""

from __future__ import annotations

from ckptcore_testing import LayoutTests
from ckptcore_versions.layout import DeltaLayout

from ckptcore.protocols import Layout


class TestFullVersions(LayoutTests):
    foreign = False
    composites = False

    def layout(self) -> Layout:
        return DeltaLayout()
