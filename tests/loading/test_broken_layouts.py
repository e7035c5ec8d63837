"""Layouts that cannot be created. Only operations that need such a layout fail, and their errors name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.layout_stores import WatchedIndex
from safetensors.numpy import save_file

import ckptcore
from ckptcore import SafetensorsLayout
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PluginError,
    TargetUndefinedError,
    UnknownPluginError,
)
from ckptcore.hookspecs import hookimpl
from ckptcore.model import JSON, TreeMetadata
from ckptcore.protocols import LayoutCapabilities, LayoutFactory
from ckptcore.runtime import runtime_of
from tests.loading.incomplete_layout import Incomplete

_CAUSE = "ModuleNotFoundError: No module named 'a_library_that_is_missing'"


class _ForgetfulLayout(SafetensorsLayout):
    """A safetensors layout whose index reads nothing and raises no error."""

    name = "forgetful"

    def index(self, tree: TreeMetadata, state: JSON) -> WatchedIndex:
        """Return an index that accepts every read and yields no data."""
        return WatchedIndex(super().index(tree, state), lambda *_: iter(()))


class _Forgetful:
    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        return {"forgetful": _ForgetfulLayout}


class _EarlierLayout(SafetensorsLayout):
    """A layout of an earlier protocol, where `differences` was a boolean."""

    name = "earlier"
    capabilities = LayoutCapabilities(differences=True)  # type: ignore[arg-type]


@pytest.fixture
def context() -> ckptcore.Context:
    return ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[Incomplete()]))


def test_checkpoints_of_other_layouts_are_saved_and_loaded(context: ckptcore.Context, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "ours", {"w": np.arange(3)}, context=context)
    assert ckptcore.load(tmp_path / "ours", context=context)["w"].tolist() == [0, 1, 2]


def test_working_layouts_read_checkpoints_of_other_software(context: ckptcore.Context, tmp_path: Path) -> None:
    save_file({"w": np.arange(3)}, tmp_path / "model.safetensors")
    assert ckptcore.load(tmp_path, context=context)["w"].tolist() == [0, 1, 2]
    assert ckptcore.metadata(tmp_path, context=context).layout == "safetensors"


def test_error_names_broken_layout_if_no_layout_reads_a_checkpoint(context: ckptcore.Context, tmp_path: Path) -> None:
    (tmp_path / "weights.odd").write_bytes(b"odd")
    with pytest.raises(
        CheckpointNotFoundError, match=r"tried .*; incomplete cannot be used: ModuleNotFoundError"
    ) as caught:
        ckptcore.load(tmp_path, context=context)
    assert _CAUSE in str(caught.value)


def test_the_error_names_the_broken_layout_if_a_save_requests_it(context: ckptcore.Context, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="cannot create its layout 'incomplete'") as caught:
        ckptcore.save(tmp_path / "c", {"w": np.arange(3)}, layout="incomplete", context=context)
    assert _CAUSE in str(caught.value) and not isinstance(caught.value, UnknownPluginError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert list(tmp_path.iterdir()) == []


def test_the_registry_lists_failed_layouts_separately(context: ckptcore.Context) -> None:
    registry = runtime_of(context).registry
    assert "incomplete" not in [layout.name for layout in registry.layouts()]
    assert registry.failed_layouts()["incomplete"] == _CAUSE
    (described,) = [info for info in registry.describe() if "incomplete" in info.layouts]
    assert described.failed_layouts == {"incomplete": _CAUSE}


def test_the_error_names_a_layout_that_reads_too_little(tmp_path: Path) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[_Forgetful()]))
    ckptcore.save(tmp_path / "c", {"w": np.ones(9)}, layout="forgetful", context=context)
    named = "w: the layout forgetful did not read all of its elements"
    with pytest.raises(CorruptCheckpointError, match=named):
        ckptcore.load(tmp_path / "c", context=context)
    with pytest.raises(TargetUndefinedError, match=named):
        ckptcore.load_into(tmp_path / "c", {"w": np.zeros(9)}, context=context)


def test_the_error_names_a_layout_that_states_no_base_of_its_differences(tmp_path: Path) -> None:
    expected = "the layout 'earlier' has True as capability `differences`: expected a `BaseReference`, or None"
    with pytest.raises(PluginError, match=expected):
        ckptcore.save(tmp_path / "c", {"w": np.ones(9)}, layout=_EarlierLayout())
    assert not (tmp_path / "c").exists()
