"""The toy layout is what ckptcore asks of a layout."""

from __future__ import annotations

from ckptcore_testing import LayoutCrashTests, LayoutTests, PluginTests
from toyscroll.layout import ScrollLayout

from ckptcore.protocols import Layout


class TestScroll(LayoutTests):
    composites = False

    def layout(self) -> Layout:
        return ScrollLayout()


class TestScrollCrashes(LayoutCrashTests):
    def layout(self) -> Layout:
        return ScrollLayout()


class TestPlugin(PluginTests):
    entry_point = "toyscroll"
    heavy = ("toyscroll.layout",)
