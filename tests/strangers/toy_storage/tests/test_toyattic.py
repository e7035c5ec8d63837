"""The toy storage is what ckptcore asks of a storage."""

from __future__ import annotations

from ckptcore.testing import PluginTests


class TestPlugin(PluginTests):
    entry_point = "toyattic"
    heavy = ("sqlite3",)
