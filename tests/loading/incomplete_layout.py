"""A plugin with a layout that imports a library which is not installed."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory


class Incomplete:
    """Offers the layout ``incomplete``."""

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """Offers a layout without its required methods."""
        return {"incomplete": _make}


def _make() -> Layout:
    import a_library_that_is_missing  # type: ignore[import-not-found]  # which is the point of it

    layout: Layout = a_library_that_is_missing.layout()
    return layout
