"""A layout that cannot be made breaks only what needs it, and is named there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, PluginError, UnknownPluginError
from ckptcore.runtime import runtime_of
from tests.loading.incomplete_layout import Incomplete

_CAUSE = "ModuleNotFoundError: No module named 'a_library_that_is_missing'"


@pytest.fixture
def context() -> ckptcore.Context:
    return ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[Incomplete()]))


def test_checkpoints_of_other_layouts_are_saved_and_loaded(context: ckptcore.Context, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "ours", {"w": np.arange(3)}, context=context)
    assert ckptcore.load(tmp_path / "ours", context=context)["w"].tolist() == [0, 1, 2]


def test_what_other_software_wrote_is_read_by_the_layouts_that_can_be_made(
    context: ckptcore.Context, tmp_path: Path
) -> None:
    save_file({"w": np.arange(3)}, tmp_path / "model.safetensors")
    assert ckptcore.load(tmp_path, context=context)["w"].tolist() == [0, 1, 2]
    assert ckptcore.metadata(tmp_path, context=context).layout == "safetensors"


def test_it_is_named_if_no_layout_reads_a_checkpoint(context: ckptcore.Context, tmp_path: Path) -> None:
    (tmp_path / "weights.odd").write_bytes(b"odd")
    with pytest.raises(
        CheckpointNotFoundError, match=r"tried .*; incomplete cannot be used: ModuleNotFoundError"
    ) as caught:
        ckptcore.load(tmp_path, context=context)
    assert _CAUSE in str(caught.value)


def test_it_is_named_where_it_is_asked_for(context: ckptcore.Context, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="cannot create its layout 'incomplete'") as caught:
        ckptcore.save(tmp_path / "c", {"w": np.arange(3)}, layout="incomplete", context=context)
    assert _CAUSE in str(caught.value) and not isinstance(caught.value, UnknownPluginError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert list(tmp_path.iterdir()) == []


def test_the_registry_tells_them_apart(context: ckptcore.Context) -> None:
    registry = runtime_of(context).registry
    assert "incomplete" not in [layout.name for layout in registry.layouts()]
    assert registry.failed_layouts()["incomplete"] == _CAUSE
    (described,) = [info for info in registry.describe() if "incomplete" in info.layouts]
    assert described.failed_layouts == {"incomplete": _CAUSE}
