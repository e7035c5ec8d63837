"""Documents of checkpoints and runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing.far_storage import FarStorage
from ckptcore_testing.faulty_storage import with_storage
from ckptcore_view.documents import DOCUMENTS, BadRequestError, CancelledError, Request, document_of
from ckptcore_view.documents.elements import format_index, parse_index
from ckptcore_view.viewed import OTHER, Viewed
from orbax.checkpoint import v1 as orbax
from safetensors.numpy import save_file

import ckptcore
from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import default_context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidLocationError
from ckptcore.model import dtype_from_name
from plugins.view.tests.conftest import Load, state

Documents = Callable[..., Load]


def paths(tree: Any) -> list[str]:
    """Return the rows of a tree as indented lines."""
    return [f"{'  ' * depth}{name}" for name, depth in zip(tree["names"], tree["depths"], strict=True)]


def leaf(tree: Any, name: str) -> int:
    return int(tree["leaves"][tree["names"].index(name)])


def test_a_checkpoint(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    assert load("view")["kind"] == "tree"
    document = load("checkpoint", at="")
    assert (document["kind"], document["layout"], document["problems"]) == ("tree", "safetensors", [])
    assert document["totals"]["arrays"] == 5
    assert document["totals"]["values"] == 2
    assert document["files"]["files"][0][0] == "model.safetensors"
    assert json.loads(document["custom"]) == {"note": "for tests"}
    assert document["digest"] == ckptcore.metadata(checkpoint).digest
    assert {"describe", "write"} <= {event["phase"] for event in document["timeline"]}


def test_a_tree_with_folded_names(checkpoint: Path, documents: Documents) -> None:
    tree = documents(checkpoint)("tree", at="")
    assert paths(tree) == [
        "<root>", "  model", "    layers", "      0", "        weight", "        bias", "      1", "        weight",
        "        bias", "    head", "  step", "  name", "  cube",
    ]  # fmt: skip
    assert tree["types"][tree["type"][4]] == "float32[64, 48]"
    assert tree["values"][str(tree["names"].index("step"))] == "5"
    assert list(tree["tied"].values()) == ["model['layers.0.weight']"]


def test_an_array_is_read_only_for_its_statistics(checkpoint: Path) -> None:
    viewed = Viewed(str(checkpoint), default_context())
    for name in ("view", "checkpoint", "tree"):
        document_of(viewed, name, Request({"at": ""}))
    document_of(viewed, "array", Request({"at": "", "leaf": "0"}))
    assert viewed.read("", lambda tree: tree.checkpoint.store.bytes_read) == 0
    document_of(viewed, "statistics", Request({"at": "", "leaf": "1"}))
    read = viewed.read("", lambda tree: tree.checkpoint.store.bytes_read)
    assert 0 < read < 64 * 48 * 4 * 3


def test_an_array_with_its_chunk(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    document = load("array", at="", leaf=leaf(load("tree", at=""), "cube"))
    assert (document["path"], document["dtype"], document["shape"], document["nbytes"]) == (
        "cube",
        "int16",
        [2, 3, 4],
        48,
    )
    (chunk,) = document["chunks"]["chunks"]
    assert (chunk["key"], chunk["nbytes"], chunk["stored"]) == ("model.safetensors", 48, "raw")
    data = (checkpoint / chunk["key"]).read_bytes()[chunk["start"] : chunk["start"] + chunk["nbytes"]]
    assert np.frombuffer(data, np.int16).tolist() == [1] * 24


def test_statistics(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    document = load("statistics", at="", leaf=leaf(load("tree", at=""), "cube"))
    assert (document["elements"], document["minimum"], document["maximum"], document["mean"]) == (24, 1.0, 1.0, 1.0)
    assert sum(document["histogram"]["counts"]) == 24
    json.dumps(document, allow_nan=False)


def test_elements(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    number = leaf(load("tree", at=""), "weight")
    first = load("elements", at="", leaf=number)
    assert (first["index"], first["shape"]) == ("[0:64, 0:48]", [64, 48])
    part = load("elements", at="", leaf=number, index="[3, ::16]")
    assert part["rows"] == [[144.0, 160.0, 176.0]]
    assert load("elements", at="", leaf=number, index="3, 5")["rows"] == [[149.0]]
    nan = load("elements", at="", leaf=3, index="0:2")
    assert nan["rows"] == [["nan", "nan"]]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[a]", "not an index"),
        ("[0:64, 0:48, 0]", "too many"),
        ("[99, 0]", "out of bounds"),
        ("__import__('os')", "not an index"),
        ("[::0]", "zero"),
        ("[None]", "not an index"),
    ],
)
def test_an_invalid_index_is_refused(index: str, message: str, checkpoint: Path, documents: Documents) -> None:
    with pytest.raises(BadRequestError, match=message):
        documents(checkpoint)("elements", at="", leaf=0, index=index)


def test_too_many_axes_and_elements(tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "c", {"cube": np.zeros((2, 2, 2)), "large": np.zeros((300, 300))})
    load = documents(tmp_path / "c")
    with pytest.raises(BadRequestError, match="3 axes"):
        load("elements", at="", leaf=0, index="[:, :, :]")
    with pytest.raises(BadRequestError, match="300 × 300"):
        load("elements", at="", leaf=1, index="...")


@pytest.mark.parametrize("text", ["[]", "[0]", "[0:4, ...]", "[::2, -1]", "[1:]", "[:, 3:-2:5]"])
def test_indices_as_text(text: str) -> None:
    array = np.arange(60).reshape(6, 10)
    index = parse_index(text)
    assert np.array_equal(array[index], eval(f"array{text if text != '[]' else '[()]'}"))  # text from this test
    assert parse_index(format_index(index)) == index


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint64", "complex64", "bfloat16", "U3", "datetime64[s]"])
def test_elements_of_any_dtype_are_json(dtype: str, tmp_path: Path, documents: Documents) -> None:
    array = np.array([0, 1, 2**60]).astype(dtype_from_name(dtype))
    ckptcore.save(tmp_path / "c", {"x": array, "scalar": array[1:2].reshape(())})
    load = documents(tmp_path / "c")
    for number in (0, 1):
        json.dumps(load("elements", at="", leaf=number), allow_nan=False)
        json.dumps(load("statistics", at="", leaf=number), allow_nan=False)


def test_a_tree_that_is_one_array(tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "c", np.arange(6.0))
    load = documents(tmp_path / "c")
    assert load("tree", at="")["leaves"] == [0]
    assert load("statistics", at="", leaf=0)["maximum"] == 5.0


def test_differences(tmp_path: Path, checkpoint: Path, documents: Documents) -> None:
    changed = state()
    changed["model"]["head"] = changed["model"]["head"].copy()
    changed["model"]["head"][3, 4] += 2
    changed["cube"] = np.ones((2, 3, 5), np.int16)
    changed["step"] = 6
    ckptcore.save(tmp_path / "other", changed)
    load = documents(checkpoint, other=str(tmp_path / "other"))
    document = load("differences", at="", other=OTHER)
    assert {(entry["path"], entry["kind"]) for entry in document["differences"]} == {
        ("step", "values"),
        ("cube", "shape"),
    }
    assert [pair["path"] for pair in document["pairs"]][-1] == "model/head"
    entry = load("difference", at="", other=OTHER, leaf=document["pairs"][-1]["leaf"])
    assert (entry["differing"], entry["largest"], entry["norm"]) == (1, 2.0, 2.0)
    assert entry["worst"][0]["index"] == [3, 4]
    assert load("difference", at="", other=OTHER, leaf=0)["differing"] == 0


def test_a_run(run: Path, documents: Documents) -> None:
    load = documents(run)
    assert load("view")["kind"] == "run"
    document = load("run")
    assert [(entry["step"], entry["state"]) for entry in document["steps"]] == [
        (10, "committed"), (20, "committed"), (30, "committed"),
    ]  # fmt: skip
    assert document["steps"][0]["metrics"] == {"loss": 0.1}
    assert document["steps"][0]["seconds"] >= document["steps"][0]["blocked"] >= 0
    assert [entry["step"] for entry in load("run", last=2)["steps"]] == [20, 30]
    assert load("run", last=2)["older"] == 1


def test_the_steps_that_a_policy_keeps(run: Path, documents: Documents) -> None:
    document = documents(run)("run", policy="latest_n=1,best_n=1:loss:max")
    assert [(entry["kept"], entry["reasons"]) for entry in document["steps"]] == [
        (True, ["the best 1 by loss (max)"]),
        (False, []),
        (True, ["the latest 1"]),
    ]
    with pytest.raises(BadRequestError, match="latest_m"):
        documents(run)("run", policy="latest_m=1")


def test_norms_over_steps(run: Path, documents: Documents) -> None:
    load = documents(run)
    norms = [load("statistics", at=step, leaf=0, of="30")["norm"] for step in (10, 20, 30)]
    assert norms == pytest.approx([norms[0], 2 * norms[0], 3 * norms[0]])
    with pytest.raises(CheckpointNotFoundError, match="no array"):
        load("statistics", at="10", leaf=99, of="30")


def test_damaged_and_unfinished_steps(run: Path, documents: Documents) -> None:
    (run / "10" / "model.safetensors").unlink()
    (run / "20" / "checkpoint.json").write_bytes(b"{")
    (run / ".40.0123456789abcdef.ckptcore").mkdir()
    document = documents(run)("run")
    assert [entry["state"] for entry in document["steps"]] == ["incomplete", "corrupt", "committed"]
    assert "model.safetensors" in document["steps"][0]["error"]
    assert document["leftovers"] == [".40.0123456789abcdef.ckptcore"]
    assert documents(run / "10")("checkpoint", at="")["problems"] == [
        ["model.safetensors", "model.safetensors is missing"]
    ]


def test_several_checkpointables(tmp_path: Path, documents: Documents) -> None:
    class Notes:
        def save(self, directory: Path) -> None:
            (directory / "notes.txt").write_text("hello")

        def load(self, directory: Path) -> None:
            raise NotImplementedError

    ckptcore.save_checkpointables(tmp_path / "c", {"model": state(), "notes": Notes()})
    load = documents(tmp_path / "c")
    assert load("view")["kind"] == "checkpointables"
    document = load("checkpoint", at="")
    assert [(entry["name"], entry["places"], entry["kind"]) for entry in document["checkpointables"]] == [
        ("model", ["model"], "tree"),
        ("notes", ["notes"], "files"),
    ]
    assert load("checkpoint", at="notes")["files"]["files"] == [["notes.txt", 5, True]]
    assert load("statistics", at="model", leaf=0)["zeros"] == 1


def test_a_replaced_checkpoint_is_read_again(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    assert load("statistics", at="", leaf=0)["maximum"] == 64 * 48 - 1
    ckptcore.save(checkpoint, state(2.0), overwrite=True)
    assert load("statistics", at="", leaf=0)["maximum"] == 2 * (64 * 48 - 1)


def test_a_checkpoint_that_is_replaced_shows_its_new_origin(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    before = load("checkpoint", at="")["save_id"]
    ckptcore.save(checkpoint, {"x": 1}, overwrite=True)
    assert load("checkpoint", at="")["save_id"] != before
    assert load("tree", at="")["names"] == ["<root>", "x"]


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3", "zarr", "dcp"])
def test_every_layout(layout: str, tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(5000.0).reshape(100, 50)}, layout=layout)
    load = documents(tmp_path / "c")
    assert load("checkpoint", at="")["layout"] == layout
    document = load("array", at="", leaf=0)
    assert document["chunks"]["count"] >= 1
    assert all(chunk["key"] or chunk["stored"] == "inline" for chunk in document["chunks"]["chunks"])
    assert load("statistics", at="", leaf=0)["maximum"] == 4999.0
    assert load("elements", at="", leaf=0, index="[2, 3:5]")["rows"] == [[103.0, 104.0]]


def test_a_file_of_safetensors(tmp_path: Path, documents: Documents) -> None:
    save_file({"a.b": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    load = documents(tmp_path / "model.safetensors")
    assert load("checkpoint", at="")["kind"] == "tree"
    assert load("statistics", at="", leaf=0)["mean"] == 1.0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_of_torch(tmp_path: Path, documents: Documents) -> None:
    dcp.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, checkpoint_id=tmp_path / "c", no_dist=True)
    load = documents(tmp_path / "c")
    assert load("checkpoint", at="")["files"]["count"] == 2
    assert load("statistics", at="", leaf=0)["maximum"] == 5.0


@pytest.mark.skipif(not hasattr(orbax, "save"), reason="an older version of Orbax")
def test_a_checkpoint_of_orbax(tmp_path: Path, documents: Documents) -> None:
    orbax.save(tmp_path / "c", {"params": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)}})
    load = documents(tmp_path / "c")
    document = load("checkpoint", at="")
    place = document["checkpointables"][0]["places"][0] if document["kind"] == "checkpointables" else ""
    assert load("statistics", at=place, leaf=0)["maximum"] == 5.0


def test_memory_storage(documents: Documents) -> None:
    ckptcore.save("memory://viewer/run/10", {"x": np.ones(3)})
    load = documents("memory://viewer/run")
    assert [entry["step"] for entry in load("run")["steps"]] == [10]
    assert load("statistics", at="10", leaf=0)["norm"] == pytest.approx(3**0.5)


@pytest.mark.parametrize("place", ["..", "../run", "30/../10", "30/..", "/etc", "//other", "30//", "nothing", "30/x"])
def test_places_outside_the_location_are_refused(place: str, run: Path, documents: Documents) -> None:
    for name in ("checkpoint", "tree"):
        with pytest.raises(CheckpointNotFoundError):
            documents(run)(name, at=place)


def test_invalid_parameters_are_refused(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    with pytest.raises(BadRequestError, match="no document"):
        load("secrets")
    for text in ("", "x", "-1", "1" * 30, "²"):
        with pytest.raises(BadRequestError, match="leaf"):
            load("array", at="", leaf=text)
    for number in (99, leaf(load("tree", at=""), "step")):
        with pytest.raises(CheckpointNotFoundError, match="no array"):
            load("array", at="", leaf=number)
    assert "secrets" not in DOCUMENTS


def test_a_read_stops_if_the_client_has_disconnected(checkpoint: Path) -> None:
    viewed = Viewed(str(checkpoint), default_context())
    with pytest.raises(CancelledError):
        document_of(viewed, "statistics", Request({"at": "", "leaf": "0"}, lambda: True))


def test_nothing_to_show(tmp_path: Path, documents: Documents) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither a checkpoint nor"):
        documents(tmp_path / "nothing")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "readme.txt").write_text("hello")
    with pytest.raises(CheckpointNotFoundError, match="neither a checkpoint nor"):
        documents(tmp_path / "text")


def test_a_run_without_steps_yet(tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "run").mkdir()
    assert documents(tmp_path / "run")("run")["steps"] == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_arrays_without_elements(shape: tuple[int, ...], tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.zeros(shape)})
    load = documents(tmp_path / "c")
    assert not any(load("elements", at="", leaf=0)["rows"])
    assert load("statistics", at="", leaf=0)["elements"] == 0


def test_slices_without_elements(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    assert load("elements", at="", leaf=0, index="[5:5]")["rows"] == []
    assert load("elements", at="", leaf=0, index="[0:2, 5:5]")["rows"] == []
    assert load("elements", at="", leaf=1, index="[3:3]")["rows"] == []


def test_bytes_and_times_of_any_kind(tmp_path: Path, documents: Documents) -> None:
    state = {"b": np.array([b"\xff\xfe", b"a"]), "t": np.array([0, 1]).view("M8"), "d": np.array([0, 1], "M8[D]")}
    ckptcore.save(tmp_path / "c", state)
    load = documents(tmp_path / "c")
    tree = load("tree", at="")
    shown = {name: load("elements", at="", leaf=leaf(tree, name))["rows"] for name in state}
    assert shown == {"b": [["\\xff\\xfe", "a"]], "t": [["0", "1"]], "d": [["1970-01-01", "1970-01-02"]]}


def test_numbers_of_arrays_are_refused_after_a_replacement(checkpoint: Path, documents: Documents) -> None:
    load = documents(checkpoint)
    version = load("tree", at="")["version"]
    numbered = [name for name in ("array", "statistics", "elements") if load(name, at="", leaf=0, version=version)]
    ckptcore.save(checkpoint, {"aaa": np.full(4, 7.0), **state()}, overwrite=True)
    assert load("tree", at="")["version"] != version
    for name in numbered:
        with pytest.raises(BadRequestError, match="was replaced meanwhile: load the page again"):
            load(name, at="", leaf=0, version=version)


def test_differences_change_when_checkpoint_is_replaced(checkpoint: Path, tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "other", state())
    load = documents(checkpoint, other=str(tmp_path / "other"))
    assert load("differences", at="", other=OTHER)["count"] == 0
    ckptcore.save(tmp_path / "other", {"w": 1}, overwrite=True)
    assert load("differences", at="", other=OTHER)["count"] > 0


def test_a_single_file_has_no_other_files(tmp_path: Path, documents: Documents) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "letter.txt").write_text("secret")
    size = (tmp_path / "model.safetensors").stat().st_size
    document = documents(tmp_path / "model.safetensors")("checkpoint", at="")
    assert document["files"] == {"count": 1, "nbytes": None, "files": [["model.safetensors", size, False]]}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_all_files_of_other_software_are_counted(tmp_path: Path, documents: Documents) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    for number in range(2_100):
        (tmp_path / "c" / f"{number}.txt").touch()
    (tmp_path / "c" / "loop").symlink_to(".")
    files = documents(tmp_path / "c")("checkpoint", at="")["files"]
    assert (files["count"], len(files["files"])) == (2_102, 2_000)


def test_secrets_in_locations_are_hidden(tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "a?token=SECRET", {"w": np.ones(3)})
    ckptcore.save(tmp_path / "b?token=SECRET", {"w": np.zeros(3)})
    load = documents(tmp_path / "a?token=SECRET", other=str(tmp_path / "b?token=SECRET"))
    loaded = [load("view"), load("checkpoint", at=""), load("differences", at="", other=OTHER)]
    assert "token=***" in json.dumps(loaded)
    assert "SECRET" not in json.dumps(loaded)


def test_tied_arrays_are_counted_once(tmp_path: Path, documents: Documents) -> None:
    w = np.ones((10, 10))
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"a": w, "b": w}})
    load = documents(tmp_path / "c")
    [part] = load("checkpoint", at="")["checkpointables"]
    totals = load("checkpoint", at="model")["totals"]
    assert (part["arrays"], part["parameters"]) == (totals["arrays"], totals["parameters"]) == (1, 100)


def test_no_step_has_a_decision_without_a_policy(run: Path, documents: Documents) -> None:
    load = documents(run)
    assert load("run", policy="  ")["policy"] is None
    assert {step["kept"] for step in load("run", policy="  ")["steps"]} == {None}


def test_steps_in_object_stores_are_read_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FarStorage()
    context = with_storage(ckptcore.Context(), "far", lambda url, _: subdirectory(storage, url.removeprefix("far://")))
    for step in (10, 20, 30):
        ckptcore.save(f"far://run/{step}", state(), context=context)
    viewed = Viewed("far://run", context, policy="latest_n=1")

    def created() -> Any:
        return document_of(viewed, "run", Request({"policy": "latest_n=1"}))["steps"]

    first = created()
    ckptcore.save("far://run/10", state(), overwrite="non-atomic", context=context)
    storage.forget()
    assert created() == first
    assert not {f"run/{step}/{ROOT_KEY}" for step in (10, 20)} & {request.key for request in storage.requests}
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert created()[0]["created"] > first[0]["created"]


def test_errors_name_the_location(checkpoint: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "good", {"w": 1})
    (checkpoint / "checkpoint.json").write_bytes(b"{")
    for location, other in ((checkpoint, ""), (tmp_path / "good", str(checkpoint))):
        with pytest.raises(CorruptCheckpointError, match=rf"^{re.escape(str(checkpoint))}: checkpoint.json is"):
            Viewed(str(location), default_context(), other=other)
    with pytest.raises(InvalidLocationError, match="not a location"):
        Viewed("", default_context())
    with pytest.raises(CheckpointNotFoundError, match="no other checkpoint to compare with"):
        Viewed(str(tmp_path / "good"), default_context()).locate(f"{OTHER}/x")


def test_a_run_at_the_root_of_a_storage(documents: Documents) -> None:
    ckptcore.save("memory://a-run-at-the-root/1", {"w": 1})
    assert [step["step"] for step in documents("memory://a-run-at-the-root")("run")["steps"]] == [1]


def test_text_is_not_read_for_statistics(tmp_path: Path, documents: Documents) -> None:
    ckptcore.save(tmp_path / "c", {"text": np.array(["a", "b"]), "empty": np.zeros(0, "U3")})
    load = documents(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    assert [load("statistics", at="", leaf=number) for number in (0, 1)] == [{"numbers": False}] * 2
