"""Chains of deltas: bases of other layouts and other software, forged references, and other storages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from ckptcore_testing import StorageSample, run_ranks
from ckptcore_testing.cases import refused
from ckptcore_testing.hostile_json import sealed
from ckptcore_testing.locations import new_place, store_at
from ckptcore_versions.deltas.layout import DeltaLayout
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.slime.layout import SlimeLayout

import ckptcore
from ckptcore.commit.root_json import summarize_root
from ckptcore.context import IOOptions
from ckptcore.errors import CheckpointReferredError, CorruptCheckpointError, PluginError
from ckptcore.inspection.completeness import FileCheck
from ckptcore.opening import bases
from ckptcore.opening.members import member_opener
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.protocols import LayoutCapabilities
from plugins.versions.tests.held import HeldState, Unwritten, version_at

CONTEXT = ckptcore.Context(durability="none")


def weights(number: int) -> dict[str, Any]:
    """Return weights of which one row changes from number to number."""
    array = np.random.default_rng(0).standard_normal((60, 40)).astype(np.float32)
    array[: number + 1] += 1
    return {"w": array, "number": number}


def save_delta(location: str, state: Mapping[str, Any], base: BaseVersion, base_state: Mapping[str, Any]) -> None:
    layout = DeltaLayout().against(HeldState(base, base_state))
    ckptcore.save(location, state, layout=layout, context=CONTEXT)


def save_chain(directory: str, count: int) -> str:
    """Save versions v0 and so on. Return the location of the last."""
    ckptcore.save(f"{directory}/v0", weights(0), context=CONTEXT)
    for number in range(1, count):
        before = f"{directory}/v{number - 1}"
        save_delta(f"{directory}/v{number}", weights(number), version_at(before), weights(number - 1))
    return f"{directory}/v{count - 1}"


def forge(location: Path, **base: Any) -> None:
    """Change the base that a root states."""
    root = json.loads((location / "checkpoint.json").read_bytes())
    root["tables"]["layout"]["base"] |= base
    (location / "checkpoint.json").write_bytes(sealed(root))


def assert_loads(location: str, number: int) -> None:
    loaded = ckptcore.load(location, context=CONTEXT)
    assert loaded["number"] == number
    np.testing.assert_array_equal(loaded["w"], weights(number)["w"])


def missing_keys(location: str, context: ckptcore.Context = CONTEXT) -> list[str | None]:
    """Return the keys of files that are missing, found without a read of arrays."""
    checkpoint = open_checkpoint(location, context)
    files = FileCheck(context).check(checkpoint, location, member_opener(checkpoint, location, context))
    keys = [problem.key for problem in files.problems]
    assert keys == missing_by_root(location, context)
    return keys


def missing_by_root(location: str, context: ckptcore.Context = CONTEXT) -> list[str | None]:
    """Return the same without opening the checkpoint, as a list of steps does."""
    store = store_at(location)
    data = store.get("checkpoint.json")
    files = FileCheck(context).check_root(location, store, data, summarize_root(data))
    return [problem.key for problem in files.problems]


# --- bases of any kind


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr", "ocdbt", "deltas"])
def test_a_base_may_have_any_layout(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "v0", weights(0), layout=layout, context=CONTEXT)
    save_delta(f"{tmp_path}/v1", weights(1), version_at(f"{tmp_path}/v0"), weights(0))
    assert_loads(f"{tmp_path}/v1", 1)
    assert ckptcore.verify(tmp_path / "v1").state == "sound"


def test_a_base_may_be_files_of_other_software(tmp_path: Path) -> None:
    (tmp_path / "v0").mkdir()
    safetensors.numpy.save_file({"w": weights(0)["w"]}, tmp_path / "v0" / "model.safetensors")
    save_delta(f"{tmp_path}/v1", weights(1), BaseVersion("v0", "", "", 0), weights(0))
    save_delta(f"{tmp_path}/v2", weights(2), version_at(f"{tmp_path}/v1"), weights(1))
    assert_loads(f"{tmp_path}/v2", 2)
    for name in ("v1", "v2"):
        report = ckptcore.verify(tmp_path / name)
        assert report.state == "complete" and report.unverified == ("../v0/model.safetensors",)
    assert ckptcore.metadata(tmp_path / "v1").bases == ("v0",)
    assert missing_keys(f"{tmp_path}/v2") == []
    shutil.rmtree(tmp_path / "v0")
    for name in ("v1", "v2"):
        assert missing_by_root(f"{tmp_path}/{name}") == ["../v0"]
    refused(lambda: ckptcore.load(tmp_path / "v2"), "v1 is stored as differences from", "v0", "does not exist")


def test_a_base_may_be_an_update(tmp_path: Path) -> None:
    save_chain(str(tmp_path), 3)
    update = {"w": weights(3)["w"], "number": 3}
    ckptcore.save(tmp_path / "update", {"number": 3}, strategy=ckptcore.Update(base=tmp_path / "v2"), context=CONTEXT)
    shown = {"w": weights(2)["w"], "number": 3}
    save_delta(f"{tmp_path}/v4", update, version_at(f"{tmp_path}/update"), shown)
    assert_loads(f"{tmp_path}/v4", 3)
    assert ckptcore.verify(tmp_path / "v4").ok


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_chains_are_read_from_any_storage(scheme: str, tmp_path: Path) -> None:
    check_chain(new_place(scheme, tmp_path).removesuffix("/step"))


@pytest.mark.system
def test_chains_are_read_from_object_stores(tmp_path: Path) -> None:
    sample: StorageSample = pytest.importorskip("ckptcore_s3.testing").SAMPLE
    with sample.open(tmp_path) as place:
        check_chain(place)


def check_chain(place: str) -> None:
    """Save, load, verify and protect a chain."""
    last = save_chain(place, 3)
    assert_loads(last, 2)
    assert ckptcore.verify(last).state == "sound"
    with pytest.raises(CheckpointReferredError):
        ckptcore.delete(f"{place}/v0", context=CONTEXT)


def test_files_of_an_update_that_is_a_base_are_checked_with_those_that_it_needs(tmp_path: Path) -> None:
    save_chain(str(tmp_path), 3)
    update = {"w": weights(3)["w"], "number": 3}
    ckptcore.save(tmp_path / "update", {"number": 3}, strategy=ckptcore.Update(base=tmp_path / "v2"), context=CONTEXT)
    shown = {"w": weights(2)["w"], "number": 3}
    save_delta(f"{tmp_path}/v4", update, version_at(f"{tmp_path}/update"), shown)
    save_delta(f"{tmp_path}/v5", weights(3), version_at(f"{tmp_path}/v4"), update)
    assert missing_keys(f"{tmp_path}/v5") == []
    (tmp_path / "v0" / "model.safetensors").unlink()
    for name in ("update", "v4", "v5"):
        assert missing_keys(f"{tmp_path}/{name}") == ["../v0/model.safetensors"]
    text = refused(lambda: ckptcore.copy(tmp_path / "v5", tmp_path / "copy", context=CONTEXT), "/v0/model.safetensors")
    assert text.count("Another checkpoint uses its arrays") == 1


def test_an_update_of_an_update_needs_no_files_of_arrays_that_were_replaced(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "v0", {"a": np.ones(3), "b": np.ones(3)}, context=CONTEXT)
    for number in (1, 2):
        strategy = ckptcore.Update(base=tmp_path / f"v{number - 1}")
        ckptcore.save(tmp_path / f"v{number}", {"ab"[number - 1]: np.zeros(3)}, strategy=strategy, context=CONTEXT)
    assert ckptcore.metadata(tmp_path / "v2").bases == ("v1",)
    (tmp_path / "v0" / "model.safetensors").unlink()
    assert missing_keys(f"{tmp_path}/v2") == []
    assert missing_keys(f"{tmp_path}/v1") == ["../v0/model.safetensors"]


def test_files_of_bases_in_another_directory_are_checked(tmp_path: Path) -> None:
    """The base of a base is in the directory of that base."""
    last = save_chain(f"{tmp_path}/versions", 3)
    context = ckptcore.Context(durability="none", io=IOOptions(bases="anywhere"))
    update = f"{tmp_path}/updates/u"
    ckptcore.save(update, {"new": np.ones(3)}, strategy=ckptcore.Update(base=last), context=context)
    assert missing_keys(update, context) == []
    (tmp_path / "versions" / "v0" / "model.safetensors").unlink()
    assert missing_keys(update, context) == ["../v0/model.safetensors"]


class Undeclared(DeltaLayout):
    """Does not say that it writes differences."""

    capabilities = LayoutCapabilities()


def test_differences_are_refused_in_an_update_or_a_composite_before_anything_is_written(tmp_path: Path) -> None:
    """They could not be loaded."""
    last = save_chain(str(tmp_path), 2)
    layout, update = Unwritten(HeldState(version_at(last), weights(1))), ckptcore.Update(base=last)
    state = {"w": weights(2)["w"]}
    refused(
        lambda: ckptcore.save(tmp_path / "update", state, layout=layout, strategy=update, context=CONTEXT),
        "the layout 'deltas' stores differences", "save without Update", "Nothing was written",
    )  # fmt: skip
    refused(
        lambda: ckptcore.save_checkpointables(tmp_path / "several", {"model": state}, layout=layout, context=CONTEXT),
        "stores differences", "a location of its own", "Nothing was written",
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["v0", "v1"]


def test_a_copy_can_be_differences_from_a_checkpoint_next_to_it(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 2)
    layout = DeltaLayout(HeldState(version_at(last), weights(1)))
    ckptcore.save(tmp_path / "plain", weights(2), context=CONTEXT)
    ckptcore.copy(tmp_path / "plain", tmp_path / "copied", layout=layout, context=CONTEXT)
    assert_loads(f"{tmp_path}/copied", 2)
    shutil.rmtree(last)
    refused(lambda: ckptcore.load(tmp_path / "copied", context=CONTEXT), "copied has arrays in", "v1", "was deleted")


@pytest.mark.parametrize("place", ["elsewhere/v2", "v1", "changed/v2"])
@pytest.mark.parametrize("kind", ["deltas", "slime"])
@pytest.mark.parametrize("is_copy", [False, True], ids=["save", "copy"])
def test_differences_are_refused_where_the_base_is_not(is_copy: bool, kind: str, place: str, tmp_path: Path) -> None:
    """Before anything is written: they could not be loaded."""
    last = save_chain(str(tmp_path), 2)
    ckptcore.save(tmp_path / "plain", weights(2), context=CONTEXT)
    ckptcore.save(tmp_path / "changed" / "v1", weights(1), context=CONTEXT)
    held = HeldState(version_at(last), weights(1))
    layout = Unwritten(held) if kind == "deltas" else SlimeLayout().against(held)
    before = sorted(tmp_path.rglob("*"))

    def save() -> None:
        if is_copy:
            ckptcore.copy(tmp_path / "plain", tmp_path / place, layout=layout, overwrite=True, context=CONTEXT)
        else:
            ckptcore.save(tmp_path / place, {"w": weights(2)["w"]}, layout=layout, overwrite=True, context=CONTEXT)

    parts = {
        "elsewhere/v2": ["elsewhere/v1, which does not exist", held.version.digest],
        "v1": ["which this save would replace"],
        "changed/v2": ["changed/v1, which is another checkpoint", held.version.digest],
    }
    refused(
        save, "would be stored as differences from", *parts[place], "Save into the directory of the base, 'v1'",
        "Nothing was written",
    )  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before
    assert_loads(last, 1)


def test_copies_of_several_objects_are_not_stored_as_differences(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 2)
    ckptcore.save_checkpointables(tmp_path / "several", {"model": {"w": weights(2)["w"]}}, context=CONTEXT)
    layout = Unwritten(HeldState(version_at(last), weights(1)))
    refused(
        lambda: ckptcore.copy(tmp_path / "several", tmp_path / "copied", layout=layout, context=CONTEXT),
        "the layout 'deltas' stores differences", "copy each object by itself", "Nothing was written",
    )  # fmt: skip
    assert not (tmp_path / "copied").exists()


def test_differences_of_a_layout_that_does_not_declare_them_are_not_committed(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 2)
    layout = Undeclared(HeldState(version_at(last), weights(1)))
    with pytest.raises(PluginError, match="wrote differences from 'v1', but does not have the capability"):
        ckptcore.save(tmp_path / "v2", weights(2), layout=layout, context=CONTEXT)
    assert not (tmp_path / "v2").exists()


# --- forged and damaged bases


@pytest.mark.parametrize(
    "name", ["../elsewhere", "a/b", "..", ".hidden", "", "/etc", "v\0", "x" * 3000], ids=lambda name: repr(name[:12])
)
def test_only_siblings_are_bases(name: str, tmp_path: Path) -> None:
    save_chain(str(tmp_path), 2)
    forge(tmp_path / "v1", name=name, save_id="", digest="")
    with pytest.raises((CorruptCheckpointError, ckptcore.CheckpointError)) as caught:
        ckptcore.load(tmp_path / "v1", context=CONTEXT)
    assert "v1" in str(caught.value) or "base" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "base", [None, [], {}, {"name": "v0"}, {"name": 3, "save_id": "", "digest": ""}, "v0"], ids=str
)
def test_a_malformed_base_is_refused(base: Any, tmp_path: Path) -> None:
    save_chain(str(tmp_path), 2)
    root = json.loads((tmp_path / "v1" / "checkpoint.json").read_bytes())
    root["tables"]["layout"]["base"] = base
    (tmp_path / "v1" / "checkpoint.json").write_bytes(sealed(root))
    refused(lambda: ckptcore.load(tmp_path / "v1", context=CONTEXT), "base", error=CorruptCheckpointError)


def test_a_cycle_of_bases_is_refused(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 3)
    forge(tmp_path / "v2", save_id="", digest="")
    forge(tmp_path / "v1", name="v2", save_id="", digest="")
    refused(lambda: ckptcore.load(last), "v1 is stored as differences from 'v2'", "needs it")
    forge(tmp_path / "v1", name="v1")
    refused(lambda: ckptcore.load(last), "v1 is stored as differences from 'v1'", "needs it")
    assert not ckptcore.verify(last).ok


def test_a_base_with_another_digest_is_refused(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 3)
    root = json.loads((tmp_path / "v0" / "checkpoint.json").read_bytes())
    root["custom" if "custom" in root else "metrics"] = {"changed": 1}
    (tmp_path / "v0" / "checkpoint.json").write_bytes(sealed(root))
    refused(lambda: ckptcore.load(last), "v1 is stored as differences from", "v0, which changed", "SHA-256")


def test_a_chain_has_a_limited_number_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = save_chain(str(tmp_path), 5)
    monkeypatch.setattr(bases, "_MAX_LINKS", 3)
    refused(lambda: ckptcore.load(last), "v1 is stored as differences from 'v0'", "the last of 3 bases")
    assert_loads(f"{tmp_path}/v3", 3)


def test_updates_within_updates_are_limited(tmp_path: Path) -> None:
    """A hostile chain of updates and deltas would otherwise be opened without end."""
    save_chain(str(tmp_path), 2)
    for number in range(8):
        base = "v1" if not number else f"d{number - 1}"
        update = ckptcore.Update(base=tmp_path / base)
        ckptcore.save(tmp_path / f"u{number}", {"number": number}, strategy=update, context=CONTEXT)
        state = {"w": weights(1)["w"], "number": number}
        held = HeldState(version_at(f"{tmp_path}/u{number}"), state)
        location = f"{tmp_path}/d{number}"
        try:
            ckptcore.save(location, state, layout=DeltaLayout().against(held), context=CONTEXT)
            ckptcore.load(location, context=CONTEXT)
        except CorruptCheckpointError as error:
            assert "an update with a base that needs further updates" in str(error)
            assert 3 <= number <= 5
            return
    pytest.fail("any number of updates is opened")


def test_a_delta_of_a_partial_or_unfinished_save_is_refused(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 2)
    (tmp_path / "v0" / "checkpoint.json").unlink()
    refused(lambda: ckptcore.load(last), "v0", error=CorruptCheckpointError)


def test_an_array_that_the_base_lacks_is_named(tmp_path: Path) -> None:
    """Its differences have no meaning."""
    last = save_chain(str(tmp_path), 2)
    ckptcore.save(tmp_path / "other", {"x": np.ones(3)}, context=CONTEXT)
    forge(tmp_path / "v1", name="other", save_id="", digest="")
    refused(lambda: ckptcore.load(last), "w of", "v1", "the base does not have the array")
    old = np.zeros((600, 400))
    new = old.copy()
    new[0, 0] = 1
    save_delta(f"{tmp_path}/v2", {"w": new}, version_at(last), {"w": old})
    forge(tmp_path / "v2", name="other", save_id="", digest="")
    refused(lambda: ckptcore.load(tmp_path / "v2"), "v2: w (float64[600, 400])", "'other', which does not have it")


def test_elements_of_another_base_are_noticed(tmp_path: Path) -> None:
    """If a base of other software was replaced, neither a save id nor a digest of the root shows it."""
    for directory, number in (("v0", 0), ("w0", 5)):
        (tmp_path / directory).mkdir()
        safetensors.numpy.save_file({"w": weights(number)["w"]}, tmp_path / directory / "model.safetensors")
    save_delta(f"{tmp_path}/v1", weights(1), BaseVersion("v0", "", "", 0), weights(0))
    forge(tmp_path / "v1", name="w0")
    refused(lambda: ckptcore.load(tmp_path / "v1"), "w of", "v1", "differ from those that were saved")
    assert [problem.arrays for problem in ckptcore.verify(tmp_path / "v1").problems] == [("w",)]


def test_damage_of_a_base_of_other_software_is_noticed_in_whole_chunks_only(tmp_path: Path) -> None:
    """Its files have no checksums. The page of the format says so."""
    (tmp_path / "v0").mkdir()
    file = tmp_path / "v0" / "model.safetensors"
    old = {"w": np.zeros((2000, 400), np.float32)}
    safetensors.numpy.save_file(old, file)
    new = {"w": old["w"].copy()}
    new["w"][0, 0] = 1
    save_delta(f"{tmp_path}/v1", new, BaseVersion("v0", "", "", 0), old)
    content = bytearray(file.read_bytes())
    content[-new["w"].nbytes + 50] ^= 1  # in the chunk that changed
    file.write_bytes(content)
    refused(lambda: ckptcore.load(tmp_path / "v1"), "w of", "v1", "differ from those that were saved")
    assert ckptcore.open(tmp_path / "v1")["w"][0].any()  # a part of the chunk
    assert ckptcore.verify(tmp_path / "v1").state == "damaged"
    content[-new["w"].nbytes + 50] ^= 1
    content[-1] ^= 1  # in a chunk that did not change
    file.write_bytes(content)
    report = ckptcore.verify(tmp_path / "v1")
    assert report.state == "complete" and report.unverified == ("../v0/model.safetensors",)


def test_processes_with_different_bases_do_not_save(tmp_path: Path) -> None:
    save_chain(str(tmp_path), 2)

    def save(rank: int, context: ckptcore.Context) -> None:
        held = HeldState(version_at(f"{tmp_path}/v{rank}"), weights(rank))
        ckptcore.save(tmp_path / "v2", weights(2), layout=DeltaLayout().against(held), context=context)

    with pytest.raises(ExceptionGroup, match="ranks failed") as caught:
        run_ranks(2, save)
    assert "every process must hold the same version" in str(caught.value.exceptions[0])
    assert not (tmp_path / "v2").exists()


def test_missing_files_of_any_base_are_found_without_reading_arrays(tmp_path: Path) -> None:
    last = save_chain(str(tmp_path), 4)
    (tmp_path / "v0" / "model.safetensors").unlink()
    (delta,) = (tmp_path / "v2").glob("deltas.*")
    delta.write_bytes(delta.read_bytes()[:-1])
    assert missing_keys(last) == [f"../v2/{delta.name}", "../v0/model.safetensors"]


def test_a_base_that_the_layout_does_not_need_is_not_read(tmp_path: Path) -> None:
    """Only deletions look at it."""
    ckptcore.save(tmp_path / "v1", weights(1), context=CONTEXT)
    root = json.loads((tmp_path / "v1" / "checkpoint.json").read_bytes())
    (tmp_path / "v1" / "checkpoint.json").write_bytes(sealed({**root, "bases": [["missing", ""]]}))
    assert_loads(f"{tmp_path}/v1", 1)
