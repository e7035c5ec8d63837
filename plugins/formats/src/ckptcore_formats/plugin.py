"""Entry module of the plugin: registers the layouts."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Layout, LayoutFactory


@hookimpl
def ckpt_layouts() -> Mapping[str, LayoutFactory]:
    """Register the layouts. Their modules are imported on first use."""
    return {
        "deepspeed": _deepspeed,
        "hdf5": _hdf5,
        "numpy": _numpy,
        "pickle": _pickle,
        "ranks": _ranks,
        "torch-checkpointing": _torch_checkpointing,
    }


def _deepspeed() -> Layout:
    from ckptcore_formats.deepspeed import DeepSpeedLayout

    return DeepSpeedLayout()


def _hdf5() -> Layout:
    from ckptcore_formats.hdf5_files import Hdf5Layout

    return Hdf5Layout()


def _numpy() -> Layout:
    from ckptcore_formats.numpy_files import NumpyLayout

    return NumpyLayout()


def _pickle() -> Layout:
    from ckptcore_formats.pickle_files import PickleLayout

    return PickleLayout()


def _ranks() -> Layout:
    from ckptcore_formats.rank_files import RankFilesLayout

    return RankFilesLayout()


def _torch_checkpointing() -> Layout:
    from ckptcore_formats.torch_checkpointing import TorchCheckpointingLayout

    return TorchCheckpointingLayout()
