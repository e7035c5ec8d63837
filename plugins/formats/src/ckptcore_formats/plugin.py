"""Entry module of the plugin: registers the layouts."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory

__all__ = ["ckpt_layouts"]


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Register the layouts. Their modules are imported on first use."""
    return {
        "deepspeed": _deepspeed,
        "ranks": _ranks,
    }


def _deepspeed() -> Layout:
    from ckptcore_formats.deepspeed import DeepSpeedLayout

    return DeepSpeedLayout()


def _ranks() -> Layout:
    from ckptcore_formats.rank_files import RankFilesLayout

    return RankFilesLayout()
