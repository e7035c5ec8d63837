"""The hooks of the plugin. Imports no tensorstore: only arrays that it decodes need it."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory

__all__ = ["ckpt_layouts"]


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Offers the layouts zarr, zarr3 and ocdbt; their modules are imported with the first one that is made."""
    return {"ocdbt": _ocdbt, "zarr": _zarr, "zarr3": _zarr3}


def _ocdbt() -> Layout:
    from ckptcore_orbax.orbax.layouts import OcdbtLayout

    return OcdbtLayout()


def _zarr() -> Layout:
    from ckptcore_orbax.orbax.layouts import ZarrLayout

    return ZarrLayout()


def _zarr3() -> Layout:
    from ckptcore_orbax.orbax.layouts import Zarr3Layout

    return Zarr3Layout()
