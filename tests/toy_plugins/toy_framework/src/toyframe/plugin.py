"""The hooks of the toy framework."""

from __future__ import annotations

import sys

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import ContainerHandler, LeafHandler


@hookimpl
def ckpt_leaf_handler(leaf_type: type) -> LeafHandler | None:
    """Return the handler of grids and sketches."""
    grids = sys.modules.get("toyframe.grids")
    if grids is None or leaf_type not in (grids.Grid, grids.Sketch):
        return None
    from toyframe.handlers import GridHandler

    return GridHandler()


@hookimpl
def ckpt_container_handler(value_type: type) -> ContainerHandler | None:
    """Return the handler of crates."""
    grids = sys.modules.get("toyframe.grids")
    if grids is None or value_type is not grids.Crate:
        return None
    from toyframe.handlers import CrateHandler

    return CrateHandler()
