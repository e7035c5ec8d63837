"""A plugin whose layout imports a library that is not installed."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory


class Incomplete:
    """A plugin with the layout ``incomplete``."""

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """Return a factory that fails to import its library."""
        return {"incomplete": _make}


def _make() -> Layout:
    import a_library_that_is_missing  # type: ignore[import-not-found]  # the test needs this error

    layout: Layout = a_library_that_is_missing.layout()
    return layout
