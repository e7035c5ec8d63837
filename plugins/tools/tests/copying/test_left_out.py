"""Files and tensors that are in the directory of other software's checkpoint, but not part of the checkpoint."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ckptcore
from ckptcore.errors import TreeMismatchError
from plugins.tools.tests.cli.conftest import Run, run

__all__ = ["run"]  # imported as a fixture

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about saves in one process

W = torch.arange(4.0)


def megatron(directory: Path) -> None:
    """Write a checkpoint with the files of a distributed optimizer of Megatron-Core (``torch_dist``)."""
    save({"model": {"w": W}, "optimizer": {"exp_avg": W}}, checkpoint_id=str(directory), no_dist=True)
    torch.save({"iteration": 100, "args": {"lr": 0.1}}, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def hugging_face(directory: Path) -> None:
    """Write a typical repository of a model."""
    directory.mkdir()
    save_file({"w": W}, directory / "model.safetensors")
    save_file({"w": W.half()}, directory / "model.fp16.safetensors")
    for name in ("config.json", "tokenizer.json", "README.md", ".gitattributes", "tokenizer.model", "merges.txt"):
        (directory / name).write_text("{}")
    for name in ("pytorch_model.bin", "training_args.bin", "original/consolidated.00.pth", ".cache/huggingface/x.bin"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": W}, directory / name)
    for name in ("tf_model.h5", "flax_model.msgpack", "onnx/model.bin"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"x")
    (directory / "adapter_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")  # a pointer of Git LFS


def trainer(directory: Path) -> None:
    """Write a checkpoint of the Trainer of transformers."""
    hugging_face(directory)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"step": 3}, directory / name)
    (directory / "trainer_state.json").write_text('{"global_step": 3}')


def short_index(directory: Path) -> None:
    """Write files of safetensors with an index that omits a tensor and a file."""
    directory.mkdir()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({"w": W, "b": W.clone()}, directory / files[0])
    save_file({"c": W}, directory / files[1])
    index = {"metadata": {}, "weight_map": {"w": files[0]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def short_index_of_torch(directory: Path) -> None:
    """Write files of `torch.save` with an index that omits a tensor and a file."""
    directory.mkdir()
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    torch.save({"w": W, "b": W}, directory / files[0])
    torch.save({"c": W}, directory / files[1])
    index = {"metadata": {}, "weight_map": {"w": files[0]}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def short_metadata(directory: Path) -> None:
    """Write a DCP checkpoint whose ``.metadata`` omits a tensor and a file."""
    save({"w": W, "b": W, "note": {"n": 3}}, checkpoint_id=str(directory), no_dist=True)
    with (directory / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    del metadata.state_dict_metadata["b"]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copy(directory / "__0_0.distcp", directory / "__1_0.distcp")


def with_adapter(directory: Path) -> None:
    """Write an adapter next to its base model."""
    directory.mkdir()
    save_file({"w": W}, directory / "model.safetensors")
    save_file({"w": W}, directory / "adapter_model.safetensors")


CASES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (megatron, ()),
    (hugging_face, ()),
    (trainer, ("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json")),
    (short_index, ("model-00001-of-00002.safetensors: b", "model-00002-of-00002.safetensors: c")),
    (short_index_of_torch, ("pytorch_model-00002-of-00002.bin", "pytorch_model-00001-of-00002.bin: b")),
    (short_metadata, ("__0_0.distcp: b", "__1_0.distcp")),
    (with_adapter, ("adapter_model.safetensors",)),
]


@pytest.mark.brings("directory with files that are no part of its checkpoint, converted", "torch", "refused")
@pytest.mark.parametrize(("write", "expected"), CASES, ids=[write.__name__ for write, _ in CASES])
def test_state_that_a_copy_would_lose(tmp_path: Path, write: Callable[[Path], None], expected: tuple[str, ...]) -> None:
    source = tmp_path / "source"
    write(source)
    report = ckptcore.verify(source)
    assert report.ok and report.left_out == expected
    ways: list[dict[str, Any]] = [{"layout": "ocdbt"}, {"subtree": ()}]
    for number, way in enumerate(ways):
        copied = tmp_path / f"copy-{number}"
        if expected:
            with pytest.raises(TreeMismatchError, match=r"so the copy would lose it.*leave_out=\[\.\.\.\]") as raised:
                ckptcore.copy(source, copied, **way)
            assert all(name in str(raised.value) for name in expected) and not copied.exists()
            first, *others = [name.partition(": ")[0] for name in expected]
            if others:
                with pytest.raises(TreeMismatchError, match="would lose it"):
                    ckptcore.copy(source, copied, **way, leave_out=[first])
            ckptcore.copy(source, copied, **way, leave_out=[first, *others])
        else:
            ckptcore.copy(source, copied, **way)
        assert ckptcore.verify(copied).ok
    ckptcore.copy(source, tmp_path / "whole")
    assert ckptcore.verify(tmp_path / "whole").left_out == expected
    ckptcore.copy(source, tmp_path / "everything", subtree=(), leave_out=["*"])


def test_files_that_a_consolidation_adds_are_not_lost(tmp_path: Path) -> None:
    megatron(tmp_path / "source")
    ckptcore.copy(tmp_path / "source", tmp_path / "copy", subtree=(), files=[tmp_path / "source" / "common.pt"])
    assert torch.load(tmp_path / "copy" / "common.pt")["iteration"] == 100
    # A copy of a subtree need not contain other files.
    ckptcore.copy(tmp_path / "source", tmp_path / "model", subtree="model")
    assert np.array_equal(ckptcore.load(tmp_path / "model")["w"], W.numpy())


def test_leave_out_without_a_conversion(tmp_path: Path) -> None:
    megatron(tmp_path / "source")
    with pytest.raises(ValueError, match="needs a layout or a subtree: without, every file is copied"):
        ckptcore.copy(  # type: ignore[call-overload]  # a user may omit the layout
            tmp_path / "source", tmp_path / "copy", leave_out=["common.pt"]
        )
    with pytest.raises(TypeError, match=r"leave_out='common.pt'\): expected a list"):
        ckptcore.copy(tmp_path / "source", tmp_path / "copy", layout="dcp", leave_out="common.pt")


def test_the_command_line_names_what_is_left_out(tmp_path: Path, run: Run) -> None:
    trainer(tmp_path / "source")
    source, copied = tmp_path / "source", tmp_path / "copy"
    assert "optimizer.pt : a copy in another layout would lose it" in run("verify", source).stdout.replace(":", " :")
    assert "optimizer.pt" in run("inspect", source).stdout
    for command in ("verify", "inspect"):
        assert json.loads(run(command, source, "--json").stdout)["left_out"][0] == "optimizer.pt"
    for command in ("convert", "consolidate"):
        result = run(command, source, copied)
        said = " ".join(result.stderr.split())
        assert result.exit_code == 6 and "with `ckptcore copy`" in said
        assert "--leave-out" in said and "leave_out=" not in said
        result = run(command, source, copied, "--leave-out", "*.pt*", "--leave-out", "trainer_state.json")
        assert result.exit_code == 0
        shutil.rmtree(copied)


def test_files_next_to_the_steps_of_a_run(tmp_path: Path) -> None:
    for step in (10, 20):
        megatron(tmp_path / "run" / f"iter_{step:07}")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    report = ckptcore.copy_steps(tmp_path / "run", tmp_path / "copy")
    assert report.left_out == ("latest_checkpointed_iteration.txt",)
    assert (tmp_path / "copy" / "iter_0000020" / "common.pt").exists()


def test_empty_files_and_steps_next_to_a_model_are_not_lost_data(tmp_path: Path) -> None:
    """PyTorch writes empty files for ranks without items. A Trainer writes the final model next to its steps."""
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", thread_count=8))
    (tmp_path / "dcp" / "__7_0.distcp").touch()
    ckptcore.copy(tmp_path / "dcp", tmp_path / "copy", layout="safetensors")
    assert ckptcore.verify(tmp_path / "dcp").left_out == ()
    run = tmp_path / "run"
    (run / "checkpoint-10").mkdir(parents=True)
    save_file(state, run / "model.safetensors")
    torch.save(state, run / "checkpoint-10" / "optimizer.pt")
    ckptcore.copy(run, tmp_path / "copy2", layout="dcp")
    (run / "2_Dense").mkdir()
    torch.save(state, run / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(TreeMismatchError, match=r"2_Dense/pytorch_model\.bin"):
        ckptcore.copy(run, tmp_path / "copy3", layout="dcp")
