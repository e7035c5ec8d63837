"""Remedies in errors for files of `torch.save` and DCP. Each test follows the advice of the text, and it works."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import PLACEHOLDER
from ckptcore.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

VALUES = torch.arange(6.0).reshape(2, 3)
SPARSE = VALUES.to_sparse()
# torch warns about it.
QUANTIZED: Callable[[], torch.Tensor] = lambda: torch.quantize_per_tensor(VALUES, 0.5, 1, torch.qint8)
IN_PARTS = [
    (lambda: SPARSE, "save its indices and values", lambda it: [it.coalesce().indices(), it.coalesce().values()]),
    (lambda: SPARSE, "or tensor.to_dense()", lambda it: it.to_dense()),
    (QUANTIZED, "save tensor.int_repr() with its", lambda it: [it.int_repr(), it.q_scale(), it.q_zero_point()]),
    (QUANTIZED, "or tensor.dequantize()", lambda it: it.dequantize()),
    (
        lambda: torch.nested.nested_tensor([VALUES[0], VALUES[1, :2]]),
        "save the tensors of tensor.unbind()",
        lambda it: list(it.unbind()),
    ),
    (lambda: torch.empty(2, device="meta"), "materialize it first", lambda it: torch.zeros_like(it, device="cpu")),
    (
        lambda: torch.complex(VALUES, VALUES).conj(),
        "save tensor.resolve_conj().resolve_neg()",
        lambda it: it.resolve_conj().resolve_neg(),
    ),
]


@pytest.mark.parametrize(("make", "text", "follow"), IN_PARTS)
def test_tensors_in_files_of_torch_save(tmp_path: Path, make: Any, text: str, follow: Any) -> None:
    value = make()
    torch.save({"w": value}, tmp_path / "refused.pt")
    try:
        loaded = ckptcore.load(tmp_path / "refused.pt", framework="torch")
    except CheckpointError as error:
        assert text in str(error)
    else:  # some torch versions save it so that it loads without the remedy
        assert same_value(loaded["w"], value)
    torch.save({"w": follow(value)}, tmp_path / "followed.pt")
    assert same_value(ckptcore.load(tmp_path / "followed.pt", framework="torch")["w"], follow(value))


def test_cycles_in_files_of_torch_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": VALUES}
    torch.save({**state, "self": state} | {"self": state}, tmp_path / "sound.pt")
    assert same_value(ckptcore.load(tmp_path / "sound.pt", framework="torch")["self"]["w"], VALUES)
    state["self"] = state
    torch.save(state, tmp_path / "cycle.pt")
    with pytest.raises(CheckpointError, match="save a tree without cycles"):
        ckptcore.load(tmp_path / "cycle.pt")


def test_the_layout_torch_cannot_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save with layout='dcp', 'safetensors'"):
        ckptcore.save(tmp_path / "c", {"w": VALUES}, layout="torch")
    for layout in ("dcp", "safetensors"):
        ckptcore.save(tmp_path / layout, {"w": VALUES}, layout=layout)
        assert same_value(ckptcore.load(tmp_path / layout, framework="torch")["w"], VALUES)


class Rebuilt:
    """Pickles as a call of a function, like tensors of other devices."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("make", "text", "follow"),
    [
        (
            lambda: Rebuilt(
                torch._utils._rebuild_device_tensor_from_numpy, VALUES.numpy(), torch.float32, "cpu", False
            ),
            "a tensor of a device that torch saves as a NumPy array: save tensor.cpu()",
            lambda it: it.cpu(),
        ),
        (
            lambda: Rebuilt(torch._utils._rebuild_xla_tensor, VALUES.numpy(), torch.float32, "cpu", False),
            "a tensor of a device that torch saves as a NumPy array: save tensor.cpu()",
            lambda it: it.cpu(),
        ),
        (
            lambda: Rebuilt(torch._utils._rebuild_device_tensor_from_cpu_tensor, VALUES, torch.float16, "cpu", False),
            "a tensor that is cast as it is loaded: save tensor.cpu()",
            lambda it: it.cpu(),
        ),
        (
            lambda: torch.arange(4).view(torch.bits16),
            "a tensor of torch.bits16, which NumPy cannot represent: save a view of it as integers",
            lambda it: it.view(torch.int16),
        ),
        (
            lambda: torch.storage.TypedStorage(wrap_storage=torch.arange(4).untyped_storage(), dtype=torch.qint32),
            "a tensor in a QInt32Storage, which NumPy cannot represent: save a view of it as integers",
            lambda it: torch.empty(0, dtype=torch.int32).set_(it.untyped()),
        ),
    ],
)
def test_tensors_that_torch_converts_as_it_loads(tmp_path: Path, make: Any, text: str, follow: Any) -> None:
    torch.save({"w": make(), "n": 1}, tmp_path / "refused.pt")
    with pytest.raises(CheckpointError) as caught:
        ckptcore.load(tmp_path / "refused.pt")
    assert f"w: it cannot be loaded, because it was saved as {text}." in str(caught.value)
    assert ckptcore.load(tmp_path / "refused.pt", {"w": PLACEHOLDER, "n": 0})["n"] == 1
    # The user who follows the advice loads with torch.
    loaded = torch.load(tmp_path / "refused.pt", weights_only=False)["w"]
    torch.save({"w": follow(loaded)}, tmp_path / "followed.pt")
    assert same_value(ckptcore.load(tmp_path / "followed.pt", framework="torch")["w"], follow(loaded))


def test_integers_that_pickles_of_torch_do_not_have(tmp_path: Path) -> None:
    number = 7**1000
    with pytest.raises(CheckpointError, match=r"^a\.n: an integer of .*; save it as text"):
        ckptcore.save(tmp_path / "c", {"a": {"n": number}}, layout="dcp")
    ckptcore.save(tmp_path / "c", {"a": {"n": str(number)}}, layout="dcp")
    assert int(ckptcore.load(tmp_path / "c")["a"]["n"]) == number


# --- damaged files, and files of other kinds --------------------------------------------------------------------------


@pytest.mark.parametrize("member", ["", "model/"])
def test_saves_of_dcp_that_did_not_finish(tmp_path: Path, member: str) -> None:
    for step in (1, 2):
        dcp.save({"w": VALUES + step}, checkpoint_id=tmp_path / f"step_{step}" / member, no_dist=True)
    (tmp_path / "step_2" / member / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=f"step_2/{member}__0_0.distcp is a data file .* Load another step"):
        ckptcore.load(tmp_path / "step_2")
    with ckptcore.CheckpointReader(tmp_path) as run:
        assert run.latest == 1
        loaded: Any = run.load_checkpointables()["model"] if member else run.load()
        assert same_value(torch.from_numpy(loaded["w"]), VALUES + 1)


def zipped(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_zips_that_torch_does_not_read(tmp_path: Path, compression: int) -> None:
    torch.save({"w": VALUES}, tmp_path / "saved.pt")
    zipped(tmp_path / "c.pt", members_of(tmp_path / "saved.pt"), compression)
    with pytest.raises(CheckpointError, match=f"of compression {compression}. Unpack it and zip the directory again"):
        ckptcore.load(tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        archive.extractall(tmp_path / "unpacked")
    # `shutil` compresses the members, and adds directories.
    made = shutil.make_archive(str(tmp_path / "again"), "zip", tmp_path / "unpacked")
    assert same_value(ckptcore.load(made, framework="torch")["w"], VALUES)
    zipped(tmp_path / "c.pt", members_of(Path(made)))
    assert same_value(ckptcore.load(tmp_path / "c.pt", framework="torch")["w"], VALUES)


def test_multi_part_zips(tmp_path: Path) -> None:
    torch.save({"w": VALUES}, tmp_path / "saved.pt")
    zipped(tmp_path / "whole.pt", members_of(tmp_path / "saved.pt"))
    data = bytearray((tmp_path / "whole.pt").read_bytes())
    end = data.rindex(b"PK\5\6")
    data[end + 4 : end + 8] = b"\1\0\1\0"  # the number of the last part, which contains the zip directory
    (tmp_path / "part.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="it is one of several parts. Join them first, as `zip -s 0"):
        ckptcore.load(tmp_path / "part.pt")
    assert same_value(ckptcore.load(tmp_path / "whole.pt", framework="torch")["w"], VALUES)


def changed(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def entry_of(data: bytearray, name: bytes) -> int:
    """Return the offset of a member's entry in the zip directory."""
    return data.rindex(name) - 46


def field(data: bytearray, at: int, value: int) -> None:
    data[at : at + 4] = value.to_bytes(4, "little")


DAMAGES: list[tuple[str, int, Callable[[bytearray], object]]] = [
    ("and another member overlap", zipfile.ZIP_STORED, lambda it: field(it, entry_of(it, b"a/data/0") + 42, 4)),
    (
        "the local header of 'a/data/0' is missing",
        zipfile.ZIP_STORED,
        lambda it: it.__setitem__(it.index(b"a/data/0"), 0),
    ),
    (
        "the header of 'a/data/0' and the directory disagree",
        zipfile.ZIP_STORED,
        lambda it: it.__setitem__(it.index(b"a/data/0") - 22, zipfile.ZIP_DEFLATED),
    ),
    (
        "'a/data.pkl' does not inflate",
        zipfile.ZIP_DEFLATED,
        lambda it: it.__setitem__(slice(it.index(b"a/data.pkl") + 10, it.index(b"a/data.pkl") + 14), b"\xff" * 4),
    ),
    (
        "bytes or more; the directory states",
        zipfile.ZIP_DEFLATED,
        lambda it: it.__setitem__(entry_of(it, b"a/data.pkl") + 24, it[entry_of(it, b"a/data.pkl") + 24] - 1),
    ),
]


@pytest.mark.parametrize(("text", "compression", "damage"), DAMAGES)
def test_damaged_zips(tmp_path: Path, text: str, compression: int, damage: Callable[[bytearray], object]) -> None:
    torch.save({"w": VALUES}, tmp_path / "saved.pt")
    members = {f"a/{name.partition('/')[2]}": data for name, data in members_of(tmp_path / "saved.pt").items()}
    zipped(tmp_path / "copy.pt", members, compression)
    shutil.copy(tmp_path / "copy.pt", tmp_path / "c.pt")
    changed(tmp_path / "c.pt", damage)
    with pytest.raises(CheckpointError) as caught:
        ckptcore.load(tmp_path / "c.pt")
    assert text in str(caught.value)
    assert str(caught.value).endswith(". Restore it from a copy, or load another checkpoint")
    shutil.copy(tmp_path / "copy.pt", tmp_path / "c.pt")
    assert same_value(ckptcore.load(tmp_path / "c.pt", framework="torch")["w"], VALUES)


def test_indexes_of_files_of_torch_save(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    files = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate("ab", 1)}
    for name, file in files.items():
        torch.save({name: VALUES}, tmp_path / file)
    expected = dict.fromkeys(files, VALUES)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="is not a valid index of torch.save files: .*; restore it from a copy"):
        ckptcore.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {**files, "b": files["a"]}}))
    with pytest.raises(
        CheckpointError, match=f"does not have it: restore {files['a']} from a copy, or correct pytorch_m"
    ):
        ckptcore.load(tmp_path)
    index.write_text(json.dumps({"weight_map": files}))
    loaded = ckptcore.load(tmp_path, framework="torch")
    assert all(same_value(loaded[name], tensor) for name, tensor in expected.items())
    (tmp_path / files["b"]).rename(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=f"which does not exist: restore {files['b']} from a copy"):
        ckptcore.load(tmp_path)
    (tmp_path / "copy").rename(tmp_path / files["b"])
    assert same_value(ckptcore.load(tmp_path, framework="torch")["b"], VALUES)


def test_damaged_files_of_dcp(tmp_path: Path) -> None:
    """Metadata in which a name is not text, and an item without a pickle."""
    location = tmp_path / "c"
    dcp.save({"w": VALUES, "n": 1.5}, checkpoint_id=location, no_dist=True)
    shutil.copytree(location, tmp_path / "copy")
    metadata = pickle.loads((location / ".metadata").read_bytes())
    items = metadata.storage_data
    metadata.storage_data = {**items, dataclasses.replace(next(iter(items)), fqn=7): next(iter(items.values()))}
    for change, text in (
        (lambda: (location / ".metadata").write_bytes(pickle.dumps(metadata, 4)), "a name in storage_data is "),
        (
            lambda: changed(
                location / "__0_0.distcp",
                lambda it: it.__setitem__(slice(None), it.replace(b"/data.pkl", b"/date.pkl")),
            ),
            "was not written by torch.save: it has no data.pkl",
        ),
    ):
        change()
        with pytest.raises(CheckpointError, match=f"{text}.*; restore it from a copy, or load another checkpoint"):
            ckptcore.load(location)
        shutil.copytree(tmp_path / "copy", location, dirs_exist_ok=True)
        loaded = ckptcore.load(location, framework="torch")
        assert same_value(loaded["w"], VALUES) and loaded["n"] == 1.5


def test_views_that_are_larger_than_their_storage(tmp_path: Path) -> None:
    row = torch.arange(2.0)
    torch.save({"w": row.expand(1 << 24, 2)}, tmp_path / "view.pt")
    with pytest.raises(CheckpointError, match=r"w: .* a view \(expand\) of .*: save the tensor that it is a view of"):
        ckptcore.load(tmp_path / "view.pt")
    torch.save({"w": row}, tmp_path / "c.pt")
    assert same_value(ckptcore.load(tmp_path / "c.pt", framework="torch")["w"], row)


def test_variants_of_a_model(tmp_path: Path) -> None:
    names = [f"pytorch_model.{variant}.bin" for variant in ("bf16", "fp16")]
    for number, name in enumerate(names):
        torch.save({"w": VALUES + number}, tmp_path / name)
    with pytest.raises(
        CheckpointError, match=f"several variants of a model: {', '.join(names)}. Name one of them as the"
    ):
        ckptcore.load(tmp_path)
    for number, name in enumerate(names):
        assert same_value(ckptcore.load(tmp_path / name, framework="torch")["w"], VALUES + number)


def test_files_of_ranks_of_which_one_is_missing(tmp_path: Path) -> None:
    for step, ranks in (("step_1", (0, 1, 2)), ("step_2", (0, 2))):
        (tmp_path / step).mkdir()
        for rank in ranks:
            torch.save({"w": VALUES + rank}, tmp_path / step / f"rank_{rank}.pt")
    with pytest.raises(
        CheckpointError, match="of rank 1 is missing, .*; load single files by their own location, or load"
    ):
        ckptcore.load(tmp_path / "step_2")
    assert same_value(ckptcore.load(tmp_path / "step_2" / "rank_2.pt", framework="torch")["w"], VALUES + 2)
    loaded = ckptcore.load(tmp_path / "step_1", framework="torch")
    assert all(same_value(loaded[f"rank_{rank}.pt"]["w"], VALUES + rank) for rank in range(3))
