"""The toy layout satisfies the protocol of layouts."""

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
