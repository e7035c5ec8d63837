"""Entry module of the plugin: registers the layouts. tensorstore is imported only for encoded arrays."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Register the layouts `zarr`, `zarr3` and `ocdbt`. Their modules are imported on first use."""
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
