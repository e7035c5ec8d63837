"""Entry module of the plugin: registers the layouts."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Register the layouts `dcp` and `torch`. Their modules are imported on first use."""
    return {"dcp": _dcp, "torch": _torch}


def _dcp() -> Layout:
    from ckptcore_dcp.layouts import DcpLayout

    return DcpLayout()


def _torch() -> Layout:
    from ckptcore_dcp.torch_files import TorchLayout

    return TorchLayout()
