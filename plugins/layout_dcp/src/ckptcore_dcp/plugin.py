"""The hooks of the plugin."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory

__all__ = ["ckpt_layouts"]


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Offers the layouts dcp and torch; their modules are imported with the first one that is made."""
    return {"dcp": _dcp, "torch": _torch}


def _dcp() -> Layout:
    from ckptcore_dcp.layouts import DcpLayout

    return DcpLayout()


def _torch() -> Layout:
    from ckptcore_dcp.torch_files import TorchLayout

    return TorchLayout()
