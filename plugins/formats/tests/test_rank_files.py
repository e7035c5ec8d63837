"""One torch.save file for each process: goldens load bit for bit. Missing and damaged files raise errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor as distributed
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError

GOLDEN = Path(__file__).parent / "golden" / "ranks"


def arrays_of(state: Any, path: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a loaded state by path."""
    if isinstance(state, np.ndarray):
        return {path[1:]: state}
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: array for key, child in pairs for name, array in arrays_of(child, f"{path}/{key}").items()}


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_a_golden_equals_the_arrays_gathered_by_torch(name: str) -> None:
    loaded = ckptcore.load(GOLDEN / name)
    arrays = arrays_of({key: child for key, child in loaded.items() if key != "extra_state"})
    with np.load(GOLDEN / f"{name}.npz") as expected:
        assert set(arrays) == set(expected.files)
        for path in expected.files:
            array = arrays[path].view(np.int16) if arrays[path].dtype.name == "bfloat16" else arrays[path]
            assert (array.dtype, array.shape) == (expected[path].dtype, expected[path].shape), path
            assert array.tobytes() == expected[path].tobytes(), path
    assert ckptcore.metadata(GOLDEN / name).layout == "ranks"
    assert ckptcore.verify(GOLDEN / name).ok


def test_the_state_of_each_rank_is_kept() -> None:
    loaded = ckptcore.load(GOLDEN / "verl")
    assert list(loaded) == ["extra_state", "model", "optim"] and list(loaded["extra_state"]) == [0, 1]
    for rank, state in loaded["extra_state"].items():
        name, keys, *_ = state["rng"]["numpy"]
        assert name == "MT19937" and np.array_equal(keys, np.random.RandomState(rank).get_state()[1])  # type: ignore[index]
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.1
    assert float(loaded["optim"]["state"][0]["step"]) == 1
    assert ckptcore.load(GOLDEN / "sharded")["epoch"] == 4


@pytest.mark.parametrize(("name", "file"), [("verl", "model_world_size_2_rank_0.pt"),
                                            ("verl", "optim_world_size_2_rank_1.pt"),
                                            ("verl", "extra_state_world_size_2_rank_1.pt"),
                                            ("mesh", "state-rank2.bin"), ("mesh", "state-rank3.bin"),
                                            ("sharded", "pytorch_model_fsdp_rank3.bin")])  # fmt: skip
def test_a_missing_rank_is_named(name: str, file: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "c")
    (tmp_path / "c" / file).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"^{file} is missing: .* was saved by [24] processes") as caught:
        ckptcore.load(tmp_path / "c")
    assert caught.value.key == file


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "verl", tmp_path / "c")
    (tmp_path / "c" / "extra_state_world_size_2_rank_1.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"extra_state_world_size_2_rank_1\.pt"):
        ckptcore.load(tmp_path / "c")


def test_files_of_several_jobs_are_an_error(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "verl", tmp_path / "c")
    shutil.copy(tmp_path / "c" / "model_world_size_2_rank_0.pt", tmp_path / "c" / "model_world_size_1_rank_0.pt")
    with pytest.raises(CorruptCheckpointError, match=r"several jobs, such as model_world_size_1_rank_0\.pt and model_"):
        ckptcore.load(tmp_path / "c")
    (tmp_path / "other").mkdir()
    (tmp_path / "c" / "model_world_size_1_rank_0.pt").rename(tmp_path / "other" / "model_world_size_1_rank_0.pt")
    assert len(ckptcore.load(tmp_path / "c")["model"]) == 6  # the remedy


def test_the_error_for_a_single_file_names_a_remedy() -> None:
    path = GOLDEN / "mesh" / "state-rank3.bin"
    with pytest.raises(UnsupportedLeafError, match=r"a part .* of a tensor float32\[7, 5\].* load the directory"):
        ckptcore.load(path)
    loaded = ckptcore.load(path, select=ckptcore.select.names("same", "number"))
    assert loaded["same"].shape == (7, 5) and loaded["number"] == 3.5
    assert ckptcore.load(path.parent)["rows"].shape == (7, 5)  # the remedy that the error names


def test_files_without_tensor_parts_load_as_a_mapping_by_file_name(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"seed": rank}, tmp_path / f"extra_state_rank_{rank}.pt")
    assert list(ckptcore.load(tmp_path)) == ["extra_state_rank_0.pt", "extra_state_rank_1.pt"]


def test_other_weights_in_the_directory_are_preferred(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "sharded", tmp_path / "c")
    torch.save({"w": torch.ones(2)}, tmp_path / "c" / "pytorch_model.bin")
    assert ckptcore.load(tmp_path / "c")["w"].shape == (2,)


def test_only_leaves_that_differ_between_processes_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "sharded", tmp_path / "c")
    for rank in range(4):
        path = tmp_path / "c" / f"pytorch_model_fsdp_rank{rank}.bin"
        content: dict[str, Any] = {"seed": rank, "list": list(range(rank)), "shape": torch.zeros(rank), "only": {}}
        content |= {"elements": torch.full((3,), rank), "equal": torch.arange(3)}
        content["only"][f"of {rank}"] = rank
        torch.save(content, tmp_path / "c" / f"other_rank_{rank}.pt")
        torch.save({"same": 3, **content, "w": part_of(rank)}, path)
    loaded = ckptcore.load(
        tmp_path / "c", select=ckptcore.select.names(*[f"pytorch_model_fsdp/{name}" for name in ("w", "only", "equal")])
    )
    assert np.array_equal(loaded["pytorch_model_fsdp"]["w"], np.arange(8, dtype=np.float32).reshape(4, 2))
    assert loaded["pytorch_model_fsdp"]["only"] == {f"of {rank}": rank for rank in range(4)}
    assert list(loaded["pytorch_model_fsdp"]["equal"]) == [0, 1, 2]
    for name in ("seed", "list", "shape", "elements"):
        with pytest.raises(UnsupportedLeafError, match="processes"):
            ckptcore.load(tmp_path / "c", select=ckptcore.select.names(f"pytorch_model_fsdp/{name}"))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "partial sum": ({"placements": (distributed.Partial(),)}, "Partial.*full_tensor"),
    "no placements": ({"placements": ()}, "as placements on a mesh of 1 axes"),
    "unknown axis": ({"placements": (distributed.Shard(5),)}, "axis 5 of 2"),
    "outside of the mesh": ({"coordinates": [7]}, "the process is at"),
    "negative coordinate": ({"coordinates": [-1]}, "natural numbers"),
    "two coordinates": ({"coordinates": [0, 0]}, "the process is at"),
    "no mesh": ({"mesh": None}, "no (local tensor|shape)"),
    "negative shape": ({"shape": (-4, 2)}, "natural numbers"),
    "huge shape": ({"shape": (1 << 61, 1 << 61)}, "not a possible array"),
    "another shape": ({"shape": (4, 3)}, "its placements give a part of"),
    "another dtype": ({"dtype": torch.int64}, "and the whole is int64"),
    "many splits": ({"placements": (_StridedShard(0, split_factor=1 << 40),)}, "split factor"),
    "no local tensor": ({"local": 3}, "no local tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_description_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    changes, reason = HOSTILE[case]
    for rank in range(4):
        torch.save({"w": part_of(rank, **(changes if rank == 1 else {}))}, tmp_path / f"state_rank_{rank}.pt")
    with pytest.raises(CheckpointError, match=reason):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize("shape", [(4,), 4, ((2, 2),)], ids=["axes", "one axis", "flattened axes"])
def test_a_mesh_of_torch_2_9(shape: Any, tmp_path: Path) -> None:
    for rank in range(4):
        torch.save({"w": part_of(rank, layout=shape)}, tmp_path / f"state_rank_{rank}.pt")
    assert np.array_equal(ckptcore.load(tmp_path)["w"], np.arange(8, dtype=np.float32).reshape(4, 2))


@pytest.mark.parametrize("rank", [0, 2])
def test_parts_that_do_not_make_up_the_whole_are_refused(rank: int, tmp_path: Path) -> None:
    for number in range(4):
        torch.save({"w": part_of(rank if number == 1 else number)}, tmp_path / f"state_rank_{number}.pt")
    with pytest.raises(CorruptCheckpointError, match="incomplete"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize(
    ("of_rank", "options"),
    [
        (lambda rank: torch.full((4,), float(rank)), {"_use_new_zipfile_serialization": False}),
        (lambda rank: torch.full((10,), float(rank))[:4], {}),
        (lambda rank: torch.arange(4.0).reshape(2, 2) if rank else torch.arange(4.0).reshape(2, 2).T, {}),
    ],
    ids=["no checksum", "views", "strides"],
)
def test_plain_tensors_that_differ_are_refused(of_rank: Any, options: Any, tmp_path: Path) -> None:
    for rank in range(4):
        torch.save({"w": part_of(rank), "x": of_rank(rank)}, tmp_path / f"state_rank_{rank}.pt", **options)
    with pytest.raises(UnsupportedLeafError, match="x: .*it differs between the processes"):
        ckptcore.load(tmp_path)
    assert ckptcore.load(tmp_path, select=ckptcore.select.names("w"))["w"].shape == (4, 2)


@pytest.mark.parametrize("differ", [False, True])
def test_replicas_are_compared(tmp_path: Path, *, differ: bool) -> None:
    mesh, placements = torch.arange(4).reshape(2, 2), (distributed.Replicate(), distributed.Shard(0))
    for rank in range(4):
        replica, shard = divmod(rank, 2)
        local = torch.arange(8.0).reshape(4, 2)[2 * shard : 2 * shard + 2].clone() + (replica if differ else 0)
        part = part_of(rank, mesh=mesh, coordinates=[replica, shard], placements=placements, local=local)
        torch.save({"w": part}, tmp_path / f"state_rank_{rank}.pt")
    if not differ:
        assert ckptcore.load(tmp_path)["w"].tolist() == torch.arange(8.0).reshape(4, 2).tolist()
        return
    with pytest.raises(UnsupportedLeafError, match=r"state_rank_0.pt and state_rank_2.pt have different elements"):
        ckptcore.load(tmp_path)


def test_other_files_of_the_program_are_ignored(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "sharded", tmp_path / "c"))
    for name in ("scheduler.bin", "training_args.bin", "rng_state_0.pth", "data.pt"):
        torch.save({"n": 1}, directory / name)
    assert ckptcore.load(directory)["epoch"] == 4


class _Reduced:
    """An object that pickles as a call, like a DTensor."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._tensor._rebuild_from_type_v2, self.arguments


def part_of(rank: int, **changes: Any) -> Any:
    """Return one row of an array with four rows, as an object that pickles like a DTensor of torch before 2.9.

    The keyword arguments change its attributes.
    """
    mesh = object.__new__(DeviceMesh)
    vars(mesh).update(mesh=changes.get("mesh", torch.arange(4)), _coordinate_on_dim=changes.get("coordinates", [rank]))
    if "layout" in changes:
        layout = object.__new__(_MeshLayout)
        vars(layout).update(shape=changes["layout"], stride=1)
        vars(mesh).update(_layout=layout)
    spec = object.__new__(DTensorSpec)
    vars(spec).update(mesh=mesh, placements=changes.get("placements", (distributed.Shard(0),)))
    local = changes.get("local", torch.arange(8.0).reshape(4, 2)[rank : rank + 1].clone())
    whole = changes.get("dtype", torch.float32), changes.get("shape", (4, 2))
    described = (distributed.DTensor, *whole, (2, 1), 0, torch.strided, torch.device("cpu"), False)
    state = (None, {"_local_tensor": local, "_spec": spec})
    return _Reduced((torch._utils._rebuild_wrapper_subclass, distributed.DTensor, described, state))
