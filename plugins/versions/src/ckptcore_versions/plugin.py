"""Hooks of the plugin: the layouts of versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory


class VersionsPlugin:
    """Adds the layouts of versions."""

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """Layouts by name. Their modules are imported on first use."""
        return {"deltas": _deltas, "slime": _slime}


def _deltas() -> Layout:
    from ckptcore_versions.layout import DeltaLayout

    return DeltaLayout()


def _slime() -> Layout:
    from ckptcore_versions.slime import SlimeLayout

    return SlimeLayout()


PLUGIN: Final = VersionsPlugin()
"""The entry point."""
