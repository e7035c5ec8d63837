"""Other software's checkpoints with missing files: errors or warnings name them, and no copy omits them silently."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
from ckptcore_testing.locations import store_at
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError

_PLUGINS: Final = Path(__file__).parents[3]
_ORBAX: Final = _PLUGINS / "layout_orbax" / "tests" / "golden"
_DCP: Final = _PLUGINS / "layout_dcp" / "tests" / "golden"
_FORMATS: Final = _PLUGINS / "formats" / "tests" / "golden"
_PIPELINE: Final = Path(__file__).parents[4] / "tests" / "foreign" / "golden_diffusers" / "pipeline"
_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=2))
_UNIVERSAL: Final = "global_step2_universal/zero/scale"


class _Missing(NamedTuple):
    """A golden checkpoint, the file or directory that is removed, and the text that the errors must contain."""

    golden: Path
    removed: str
    named: str


_FILES: Final = {
    "DCP, arrays": _Missing(_DCP / "two_processes_apart", "__1_0.distcp", "__1_0.distcp"),
    "DCP, a value": _Missing(_DCP / "file_per_item", "__0_9.distcp", "__0_9.distcp"),
    "DCP, the metadata of a process": _Missing(_DCP / "two_processes_apart", "__1.metadata", "__1.metadata is missing"),
    "DCP in a step": _Missing(_DCP / "step_of_several", "optimizer/__0_0.distcp", "optimizer/__0_0.distcp"),
    "Megatron": _Missing(_FORMATS / "megatron" / "torch_dist", "common.pt", "common.pt"),
    "ZeRO": _Missing(
        _FORMATS / "deepspeed" / "zero2_bf16",
        "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing",
    ),
    "universal, a weight": _Missing(_FORMATS / "deepspeed" / "universal_zero1", f"{_UNIVERSAL}/fp32.pt", "scale/fp32"),
    "universal, a state": _Missing(
        _FORMATS / "deepspeed" / "universal_zero3", f"{_UNIVERSAL}/exp_avg.pt", "exp_avg.pt"
    ),
    "universal, a parameter": _Missing(_FORMATS / "deepspeed" / "universal_zero3", _UNIVERSAL, "scale/fp32.pt is mis"),
    "ranks": _Missing(_FORMATS / "ranks" / "sharded", "pytorch_model_fsdp_rank3.bin", "fsdp_rank3.bin is missing"),
    "torch_checkpointing": _Missing(_FORMATS / "torch_checkpointing" / "plain", "step_1.pt", "step_1.pt is missing"),
    "Orbax, an array": _Missing(_ORBAX / "axlearn" / "step_00000004", "gda/model/decoder/emb", "decoder/emb/weight"),
    "Orbax, a chunk": _Missing(_ORBAX / "v0_pytree_plain", "params.scale/0", "params.scale/0"),
    "Orbax, an encoded chunk": _Missing(_ORBAX / "v0_without_metadata", "params.scale/0", "'params.scale' is missing"),
    "Orbax, values of OCDBT": _Missing(
        _ORBAX / "v1_separate_nodes", "state/ocdbt.process_0/ocdbt_data", "ocdbt.process_0/ocdbt_data"
    ),
}

_ITEMS: Final = {
    "Orbax v1": _Missing(_ORBAX / "v1_composite", "ema", "'ema'"),
    "Orbax v1, the default": _Missing(_ORBAX / "v1_composite", "state", "'state'"),
    "Orbax v1, a document": _Missing(_ORBAX / "v1_composite", "config", "'config'"),
    "Orbax v0": _Missing(_ORBAX / "manager_items" / "1", "extra", "'extra'"),
    "diffusers": _Missing(_PIPELINE, "unet", "'unet'"),
}


def _without(missing: _Missing, to: Path) -> Path:
    shutil.copytree(missing.golden, to)
    removed = to / missing.removed
    shutil.rmtree(removed) if removed.is_dir() else removed.unlink()
    return to


def _assert_not_copied(source: Path, named: str, tmp_path: Path) -> None:
    copies: list[Callable[..., object]] = [ckptcore.copy, partial(ckptcore.copy, layout="safetensors")]
    for copy in copies:
        with pytest.raises(CorruptCheckpointError) as raised:
            copy(source, tmp_path / "copy", context=_FAST)
        assert named in str(raised.value)
        assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("missing", _FILES.values(), ids=_FILES.keys())
def test_a_file_that_is_missing_is_an_error(missing: _Missing, tmp_path: Path) -> None:
    source = _without(missing, tmp_path / "c")
    assert any(missing.named in problem.message for problem in ckptcore.verify(source).problems)
    load = ckptcore.load_checkpointables if "step_of_several" in str(missing.golden) else ckptcore.load
    with pytest.raises(CorruptCheckpointError, match="missing"):
        load(source)
    _assert_not_copied(source, missing.named, tmp_path)


def test_a_process_that_is_missing_with_its_metadata(tmp_path: Path) -> None:
    """Some arrays lack the shards of the missing process. Other arrays can be loaded, but a copy is an error."""
    source = _without(_FILES["DCP, arrays"], tmp_path / "c")
    (source / "__1.metadata").unlink()
    _assert_not_copied(source, "by_rows (float32[5, 3]) is incomplete", tmp_path)


@pytest.mark.parametrize("missing", _ITEMS.values(), ids=_ITEMS.keys())
def test_a_checkpointable_that_is_missing_is_an_error(
    missing: _Missing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The test also follows the remedy in the error."""
    name = missing.removed
    source = _without(missing, tmp_path / "c")
    members = ckptcore.metadata(source).checkpointables
    assert members.deleted == (name,) and name not in members
    (problem,) = ckptcore.verify(source).problems
    assert problem.key == name and f"'{name}' is listed but missing" in problem.message
    with caplog.at_level(logging.WARNING, "ckptcore"):
        assert list(ckptcore.load_checkpointables(source)) == list(members)
    assert name in caplog.text
    _assert_not_copied(source, missing.named, tmp_path)
    with pytest.raises((CorruptCheckpointError, TreeMismatchError), match=f"'{name}'"):
        ckptcore.copy(source, tmp_path / "copy", subtree=name)
    with pytest.raises(CorruptCheckpointError, match=f"'{name}' is listed but missing.*leave_out=\\['{name}'\\]"):
        ckptcore.copy(source, tmp_path / "copy", subtree="")
    ckptcore.copy(source, tmp_path / "copy", layout="dcp", leave_out=[name], context=_FAST)
    assert list(ckptcore.load_checkpointables(tmp_path / "copy")) == list(members)


def test_a_load_does_not_replace_a_missing_default_tree_by_another_tree(tmp_path: Path) -> None:
    source = _without(_ITEMS["Orbax v1, the default"], tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match=r"'state' is listed in _CHECKPOINT_METADATA, but.*config, ema"):
        ckptcore.load(source)
    assert list(ckptcore.load_checkpointables(source, ["ema"])) == ["ema"]


def test_a_checkpointable_with_an_empty_directory_is_missing(tmp_path: Path) -> None:
    source = _without(_ITEMS["Orbax v1"], tmp_path / "c")
    (source / "ema").mkdir()
    assert ckptcore.metadata(source).checkpointables.deleted == ("ema",)
    _assert_not_copied(source, "'ema'", tmp_path)


def test_none_of_the_listed_checkpointables_exists(tmp_path: Path) -> None:
    source = _without(_Missing(_ORBAX / "v1_default", "state", ""), tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match="state is listed, and nothing of it exists"):
        ckptcore.load_checkpointables(source)
    _assert_not_copied(source, "'state' is listed", tmp_path)


def test_an_item_that_orbax_deletes_is_not_missing(tmp_path: Path) -> None:
    """Orbax removes the name at the end of a deletion. Until then, a file names the item that is being deleted."""
    source = _without(_ITEMS["Orbax v1"], tmp_path / "c")
    record = {"operation_id": "0", "checkpointable_name": "ema", "destination": None}
    (source / "_CHECKPOINT_DELETION").write_text(json.dumps(record))
    assert ckptcore.verify(source).ok
    ckptcore.copy(source, tmp_path / "copy", layout="dcp", context=_FAST)
    assert list(ckptcore.load_checkpointables(tmp_path / "copy")) == ["config", "state"]


@pytest.mark.parametrize("part", ["scheduler", "tokenizer"])
def test_parts_of_a_pipeline_without_weights_may_be_missing(part: str, tmp_path: Path) -> None:
    source = _without(_Missing(_PIPELINE, part, ""), tmp_path / "c")
    assert ckptcore.verify(source).ok and not ckptcore.metadata(source).checkpointables.deleted


def test_a_model_of_a_pipeline_without_its_weights_is_an_error(tmp_path: Path) -> None:
    """A download of only the configs leaves such a directory."""
    source = tmp_path / "c"
    shutil.copytree(_PIPELINE, source)
    for path in (source / "unet").glob("*.safetensors*"):
        path.unlink()
    assert "unet" in ckptcore.metadata(source).checkpointables.unreadable
    with pytest.raises(ckptcore.CheckpointError, match="unet"):
        ckptcore.copy(source, tmp_path / "copy", layout="dcp")


def test_a_missing_shard_of_an_index_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "c"
    source.mkdir()
    save_file({"a": np.ones(3)}, source / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    _assert_not_copied(source, "model-00002-of-00002.safetensors, which does not exist", tmp_path)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_copy_of_our_own_checkpoint_warns_about_missing_checkpointables(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = str(tmp_path) if kind == "file" else f"memory://{tmp_path.name}"
    ckptcore.save_checkpointables(f"{place}/c", {"params": {"w": np.ones(3)}, "ema": {"w": np.ones(3)}}, context=_FAST)
    store = store_at(f"{place}/c")
    store.delete(list(store.list("ema")))
    with caplog.at_level(logging.WARNING, "ckptcore"):
        ckptcore.copy(f"{place}/c", f"{place}/copy", context=_FAST)
    assert "is copied without ema, which it lists and which is missing" in caplog.text
