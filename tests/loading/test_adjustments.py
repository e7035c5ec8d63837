"""Loads in another dtype or shape than stored. They are refused unless allowed; the result equals NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork

import ckptcore
from ckptcore import AbstractArray, Context, Matching, select, transforms
from ckptcore.context import JobOptions, MemoryOptions
from ckptcore.derivations.dtypes import is_narrowing
from ckptcore.errors import TargetUndefinedError, TransformError, TreeMismatchError
from ckptcore.model import HostArray, dtype_from_name
from ckptcore.results import LoadReport

SAFE, NARROWING = Matching(cast="safe"), Matching(cast="narrowing")


@pytest.mark.parametrize(
    ("asked", "stored"),
    [("int32", "complex64"), ("float64", "complex64"), ("bool", "int8"), ("bool", "float32"),
    ("int64", "datetime64[s]"), ("U4", "U3")],
)  # fmt: skip
def test_no_option_allows_casts_between_kinds_of_dtypes(tmp_path: Path, asked: str, stored: str) -> None:
    assert not is_narrowing(asked, stored)
    ckptcore.save(tmp_path / "c", {"w": np.zeros(2, dtype_from_name(stored))})
    with pytest.raises(TreeMismatchError, match="no cast from"):
        ckptcore.load(tmp_path / "c", {"w": AbstractArray((2,), asked)}, matching=NARROWING)


@pytest.mark.parametrize("stored", ["float32", "float64", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("asked", ["int8", "int64", "uint64", "int4"])
def test_only_a_truncating_cast_turns_floats_into_ints(tmp_path: Path, asked: str, stored: str) -> None:
    values = np.array([-0.9, 0.0, 0.4, 1.5, 3.9, 7.25]).astype(dtype_from_name(stored))
    ckptcore.save(tmp_path / "c", {"w": values})
    wanted = {"w": AbstractArray((6,), asked)}
    for matching in (SAFE, NARROWING):
        with pytest.raises(TreeMismatchError, match=f'(?s){asked} has no fractions.*Matching\\(cast="truncating"\\)'):
            ckptcore.load(tmp_path / "c", wanted, matching=matching)
    report = LoadReport()
    loaded = ckptcore.load(tmp_path / "c", wanted, matching=Matching(cast="truncating"), report=report)
    assert loaded["w"].dtype == dtype_from_name(asked)
    assert loaded["w"].astype(np.int64).tolist() == np.trunc(values.astype(np.float64)).astype(np.int64).tolist()
    assert report.changed["w"].cast == "truncating"


@pytest.mark.parametrize("value", [128.0, -129.0, np.nan, np.inf])
def test_a_float_out_of_the_range_of_an_int_is_an_error(tmp_path: Path, value: float) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.array([1.0, value])})
    with pytest.raises(ValueError, match="is out of range for int8"):
        ckptcore.load(tmp_path / "c", {"w": AbstractArray((2,), "int8")}, matching=Matching(cast="truncating"))


def by_load(location: Path, abstract: Any, **options: Any) -> Any:
    return ckptcore.load(location, abstract, **options)


def in_background(location: Path, abstract: Any, **options: Any) -> Any:
    return ckptcore.load_async(location, abstract, **options).result(60)


def in_place(location: Path, abstract: Any, **options: Any) -> Any:
    target = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
    filled = dict(target)
    ckptcore.load_into(location, target, **options)
    assert all(target[name] is filled[name] for name in target)
    return target


def into_tensors(location: Path, abstract: Any, **options: Any) -> Any:
    import torch

    target = {name: torch.zeros(leaf.shape, dtype=getattr(torch, leaf.dtype.name)) for name, leaf in abstract.items()}
    ckptcore.load_into(location, target, **options)
    return target


def as_tensors(location: Path, abstract: Any, **options: Any) -> Any:
    import torch

    asked = {
        name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name), device="meta")
        for name, leaf in abstract.items()
    }
    return ckptcore.load(location, asked, **options)


def as_jax_arrays(location: Path, abstract: Any, **options: Any) -> Any:
    import jax

    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    asked = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]  # JAX leaves it untyped
        for name, leaf in abstract.items()
    }
    return ckptcore.load(location, asked, **options)


LOADS = pytest.mark.parametrize("loading", [by_load, in_background, in_place, into_tensors, as_tensors, as_jax_arrays])

STORED = np.arange(48, dtype=np.float32).reshape(8, 6) + np.float32(1 / 3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckptcore.save(tmp_path / "c", {"w": STORED})
    return tmp_path / "c"


@LOADS
@pytest.mark.parametrize(
    ("shape", "dtype", "needed", "expected"),
    [
        ((8, 6), "float16", {"cast": "narrowing"}, STORED.astype(np.float16)),
        ((8, 6), "bfloat16", {"cast": "narrowing"}, STORED.astype(ml_dtypes.bfloat16)),
        ((4, 12), "float32", {"shapes": ["reshape"]}, STORED.reshape(4, 12)),
        ((4, 5), "float32", {"shapes": ["truncate"]}, STORED[:4, :5]),
        ((12, 6), "float32", {"shapes": ["pad"]}, np.pad(STORED, ((0, 4), (0, 0)))),
        ((12, 3), "float32", {"shapes": ["pad", "truncate"]}, np.pad(STORED[:, :3], ((0, 4), (0, 0)))),
        (
            (12, 3), "float16", {"shapes": ["pad", "truncate"], "cast": "narrowing", "pad_value": -1},
            np.pad(STORED[:, :3].astype(np.float16), ((0, 4), (0, 0)), constant_values=-1),
        ),
        ((48,), "float16", {"shapes": ["reshape"], "cast": "narrowing"}, STORED.astype(np.float16).reshape(48)),
    ],
)  # fmt: skip
def test_arrays_change_only_in_the_allowed_ways(
    saved: Path, loading: Callable[..., Any], shape: tuple[int, ...], dtype: str, needed: dict[str, Any], expected: Any
) -> None:
    asked = {"w": AbstractArray(shape, dtype)}
    for name, without in (
        (name, {**needed, name: ()} if name == "shapes" else {**needed, name: "error"}) for name in needed
    ):
        if name == "pad_value":
            continue
        with pytest.raises(TreeMismatchError) as caught:
            loading(saved, asked, matching=Matching(**without))
        assert caught.value.differences[0].startswith(f"w: {'shape' if name == 'shapes' else 'dtype'}: ")
        assert f"matching=Matching({name}=" in str(caught.value)  # says how to allow it
    report = LoadReport()
    loaded = loading(saved, asked, matching=Matching(**needed), report=report)["w"]
    if loading in (into_tensors, as_tensors):
        assert str(loaded.dtype) == f"torch.{dtype}"
        loaded = loaded.float().numpy().astype(expected.dtype)
    loaded = np.asarray(loaded)
    assert loaded.dtype == expected.dtype and np.array_equal(loaded, expected)
    (change,) = report.changed.values()
    assert (change.loaded.shape, change.loaded.dtype, change.cast) == (shape, dtype, needed.get("cast", "error"))
    assert change.shapes == set(needed.get("shapes", ())) and list(report.changed) == ["w"] and not report.restored


def test_safe_casts_exclude_narrowing_ones(tmp_path: Path) -> None:
    half = np.array([1.5, np.inf, -0.0, np.nan], np.float16)
    ckptcore.save(tmp_path / "c", {"w": half, "n": np.array([255, 0], np.uint8)})
    asked = {"w": AbstractArray((4,), "float32"), "n": AbstractArray((2,), "bfloat16")}
    loaded = ckptcore.load(tmp_path / "c", asked, matching=SAFE)
    assert loaded["w"].tobytes() == half.astype(np.float32).tobytes() and loaded["n"].astype(int).tolist() == [255, 0]
    asked = {"w": AbstractArray((4,), "bfloat16"), "n": AbstractArray((2,), "int8")}
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", asked, matching=SAFE)
    assert caught.value.differences == (
        "w: dtype: bfloat16[4] is requested, float16[4] is stored; bfloat16 cannot represent every value of float16",
        "n: dtype: int8[2] is requested, uint8[2] is stored; int8 cannot represent every value of uint8",
    )
    assert 'Matching(cast="narrowing")' in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "asked", "said"),
    [
        (np.array([1, 128], np.int64), "int8", "128 is out of range for int8 (-128 to 127)"),
        (np.array([-1], np.int8), "uint64", "-1 is out of range for uint64"),
        (np.array([2**63], np.uint64), "int64", "is out of range for int64"),
        (np.array([1e6, np.nan, np.inf]), "float16", "1000000.0 is out of range for float16, whose largest"),
        (np.array([500.0], np.float32), "float8_e4m3fn", "500.0 is out of range"),
        (np.array([np.inf], np.float32), "float8_e4m3fn", "inf is out of range"),
        (np.array([np.nan], np.float32), "float4_e2m1fn", "nan is out of range"),
        (np.array([9.0], np.float32), "float6_e2m3fn", "9.0 is out of range"),
        (np.array([1e300 + 0j]), "complex64", "out of range"),
    ],
)  # fmt: skip
def test_values_out_of_range_neither_wrap_nor_become_infinite(
    tmp_path: Path, stored: HostArray, asked: str, said: str
) -> None:
    ckptcore.save(tmp_path / "c", {"a": {"w": stored}})
    abstract = {"a": {"w": AbstractArray(stored.shape, asked)}}
    with pytest.raises(TransformError) as caught:
        ckptcore.load(tmp_path / "c", abstract, matching=NARROWING)
    assert said in str(caught.value) and "a/w" in str(caught.value)
    target = {"a": {"w": np.zeros(stored.shape, dtype_from_name(asked))}}
    with pytest.raises(TargetUndefinedError, match="a/w"):
        ckptcore.load_into(tmp_path / "c", target, matching=NARROWING)


def test_infinities_and_nan_are_kept_if_the_dtype_has_them(tmp_path: Path) -> None:
    stored = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-60])
    ckptcore.save(tmp_path / "c", {"w": stored})
    loaded = ckptcore.load(tmp_path / "c", {"w": AbstractArray((5,), "bfloat16")}, matching=NARROWING)["w"]
    assert list(map(str, loaded.astype(float))) == ["inf", "-inf", "nan", "-0.0", "0.0"]


@pytest.mark.parametrize(
    ("dtype", "pad_value", "padded"),
    [("float32", float("nan"), "nan"), ("int8", -1, "-1"), ("int8", 0.5, None), ("int8", 300, None),
    ("bool", True, "1.0"),
     ("float8_e8m0fnu", 0, None), ("uint4", 15, "15.0")],
)  # fmt: skip
def test_pad_values_must_be_values_of_the_dtype(tmp_path: Path, dtype: str, pad_value: Any, padded: str | None) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(2, dtype_from_name(dtype))})
    matching = Matching(shapes={"pad"}, pad_value=pad_value)
    asked = {"w": AbstractArray((3,), dtype)}
    if padded is None:
        with pytest.raises(TreeMismatchError, match="cannot represent|cannot be those of|out of range"):
            ckptcore.load(tmp_path / "c", asked, matching=matching)
        return
    loaded = ckptcore.load(tmp_path / "c", asked, matching=matching)["w"]
    assert str(float(loaded[2])) == str(float(padded)) and loaded[:2].astype(float).tolist() == [1, 1]


@pytest.mark.parametrize(("dtype", "pad_value"), [("int8", 0.5), ("int8", 300), ("bool", 1), ("float8_e8m0fnu", 0)])
def test_the_error_about_a_pad_value_names_the_option(tmp_path: Path, dtype: str, pad_value: float) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(2, dtype_from_name(dtype))})
    matching = Matching(shapes={"pad"}, pad_value=pad_value)
    with pytest.raises(TreeMismatchError, match=f"pad_value: {dtype} cannot represent {pad_value}"):
        ckptcore.load(tmp_path / "c", {"w": AbstractArray((3,), dtype)}, matching=matching)


@pytest.mark.parametrize("shape", [(6, 8), (8,), (9, 6, 1), (0, 6)])
def test_only_shapes_that_fit_are_changed(saved: Path, shape: tuple[int, ...]) -> None:
    allowed = {"reshape"} if shape in ((8,), (9, 6, 1), (0, 6)) else {"truncate"}
    with pytest.raises(TreeMismatchError, match="shape: "):
        ckptcore.load(saved, {"w": AbstractArray(shape, "float32")}, matching=Matching(shapes=allowed))  # type: ignore[arg-type]  # words


def test_tied_arrays_stay_tied_if_they_are_cast_to_one_dtype(tmp_path: Path) -> None:
    tied = np.arange(4.0)
    ckptcore.save(tmp_path / "c", {"a": tied, "b": tied, "c": tied, "d": tied})
    asked = dict.fromkeys("bd", AbstractArray((4,), "float32"))
    whole = {"a": AbstractArray((4,), "float64"), "c": AbstractArray((2,), "float64"), **asked}
    matching = Matching(cast="narrowing", shapes={"truncate"}, unexpected="ignore")
    loaded = ckptcore.load(tmp_path / "c", whole, matching=matching)
    assert loaded["b"] is loaded["d"] and loaded["b"].dtype == np.float32
    assert loaded["a"].tolist() == [0, 1, 2, 3] and loaded["c"].tolist() == [0, 1]
    only = ckptcore.load(tmp_path / "c", asked, matching=matching)
    assert only["b"] is only["d"] and only["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [
        {"cast": "always"}, {"cast": True}, {"shapes": "pad"}, {"shapes": ["crop"]}, {"shapes": None},
        {"shapes": [["pad"]]},
        {"pad_value": "0"}, {"pad_value": None}, {"pad_value": np.zeros(2)},
    ],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises((ValueError, TypeError), match=rf"Matching\({name}=.*expected"):
        Matching(**options)


def test_only_plain_arrays_are_cast_or_reshaped(tmp_path: Path) -> None:
    import jax

    ckptcore.save(tmp_path / "c", {"key": jax.random.key(0), "text": "x" * 20000, "n": 3})
    everything = Matching(cast="narrowing", shapes={"reshape", "truncate", "pad"}, values="error")
    asked = {
        "key": AbstractArray((1,), "uint32"),
        "text": AbstractArray((5,), "uint8"),
        "n": AbstractArray((), "int32"),
    }
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", asked, matching=everything)
    assert [line.partition(":")[0] for line in caught.value.differences] == ["key", "text", "n"]


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Path, HostArray]:
    array = np.arange(8 << 20, dtype=np.float32).reshape(8192, 1024)
    ckptcore.save(tmp_path / "rows", {"w": array})
    return tmp_path / "rows", array


def test_a_truncating_load_reads_only_the_kept_rows(rows: tuple[Path, HostArray]) -> None:
    import jax

    location, array = rows
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    asked = jax.ShapeDtypeStruct((6144, 1024), "bfloat16", sharding=sharding)  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    report = LoadReport()
    matching = Matching(cast="narrowing", shapes={"truncate"})
    loaded = ckptcore.load(location, {"w": asked}, matching=matching, report=report)["w"]
    assert np.array_equal(np.asarray(loaded), array[:6144].astype(ml_dtypes.bfloat16)) and loaded.sharding == sharding
    assert array[:6144].nbytes <= report.bytes_read <= 1.1 * array[:6144].nbytes


@pytest.fixture
def second_of_two(rows: tuple[Path, HostArray]) -> Iterator[None]:
    from tests.jobs.torch_groups import process_group

    with process_group("fake", rank=1, size=2):
        yield


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_process_reads_its_shards(rows: tuple[Path, HostArray], in_place: bool) -> None:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    location, array = rows
    mesh = DeviceMesh("cpu", torch.arange(2))
    half = torch.zeros(4096 * 1024 // 512, 512, dtype=torch.bfloat16, device="cpu" if in_place else "meta")
    asked = DTensor.from_local(half, mesh, [Shard(0)], run_check=False)
    report = LoadReport()
    matching = Matching(cast="narrowing", shapes={"reshape"})
    context = Context(
        memory=MemoryOptions(load_bytes=1 << 20), job=JobOptions(reads="alone")
    )  # the other process does not exist
    load = ckptcore.load_into if in_place else ckptcore.load
    loaded = load(location, {"w": asked}, matching=matching, report=report, context=context)["w"]
    expected = torch.from_numpy(array[4096:].reshape(-1, 512)).to(torch.bfloat16)
    assert torch.equal(loaded.to_local(), expected) and loaded.shape == (16384, 512)
    assert expected.nbytes * 2 <= report.bytes_read <= 1.1 * expected.nbytes * 2


def shared(work: Callable[[Context, int], Any]) -> Any:
    network, job = ThreadNetwork(2, timeout_seconds=60), ThreadJob(2, timeout_seconds=60)

    def of_rank(coordinator: Any) -> Any:
        context = Context(
            job=JobOptions(
                coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads="broadcast"
            )
        )
        return work(context, coordinator.rank)

    return job.run(of_rank)


def test_all_processes_of_a_joint_load_get_cast_arrays(saved: Path) -> None:
    matching = Matching(cast="narrowing", shapes={"pad"})
    reports = [LoadReport(), LoadReport()]

    def work(context: Context, rank: int) -> Any:
        asked = {"w": AbstractArray((10, 6), "float16")}
        return ckptcore.load(saved, asked, matching=matching, context=context, report=reports[rank])["w"]

    for loaded in shared(work):
        assert np.array_equal(loaded, np.pad(STORED.astype(np.float16), ((0, 2), (0, 0))))
    assert all(list(report.changed) == ["w"] for report in reports)


def test_adjustments_apply_after_selections_and_transforms(tmp_path: Path) -> None:
    other = STORED * 3
    ckptcore.save(tmp_path / "c", {"old": {"w": STORED}, "b": np.ones(2), "c": np.ones(3)})
    ckptcore.save(tmp_path / "other", {"old": {"w": other}, "b": np.ones(2), "c": np.ones(3)})
    report = LoadReport()
    loaded = ckptcore.load(
        tmp_path / "c",
        {"new": {"w": AbstractArray((4, 6), "bfloat16")}, "b": AbstractArray((2,), "float32")},
        select=select.names("old/w", "b"),
        transforms=[transforms.Average([tmp_path / "other"]), transforms.Rename("old/w", "new/w")],
        matching=Matching(cast="narrowing", shapes={"truncate"}),
        report=report,
    )
    expected = ((STORED + other) / 2)[:4].astype(ml_dtypes.bfloat16)
    assert np.array_equal(loaded["new"]["w"], expected) and loaded["b"].tolist() == [1, 1]
    assert list(report.changed) == ["new/w", "b"] and report.bytes_read > 0
