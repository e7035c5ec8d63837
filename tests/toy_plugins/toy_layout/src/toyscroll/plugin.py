"""The hooks of the toy layout."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import LayoutFactory


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Return the layout ``scroll``."""
    from toyscroll.layout import ScrollLayout

    return {"scroll": ScrollLayout}
