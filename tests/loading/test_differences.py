"""Differences between abstract and stored trees. One error lists all that are refused, a report those allowed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Matching
from ckptcore.errors import TreeMismatchError
from ckptcore.results import LoadReport
from ckptcore.tree.suggestions import NameSuggestions

ONES = np.ones(3, np.float32)


class Pair(NamedTuple):
    a: Any
    b: Any


def wanted(*names: str) -> dict[str, AbstractArray]:
    return dict.fromkeys(names, AbstractArray((3,), "float32"))


def load(location: Path, abstract: Any, **options: Any) -> Any:
    return ckptcore.load(location, abstract, **options)


def load_in_background(location: Path, abstract: Any, **options: Any) -> Any:
    return ckptcore.load_async(location, abstract, **options).result(60)


def load_into(location: Path, abstract: Any, **options: Any) -> Any:
    filled = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
    return ckptcore.load_into(location, filled, **options)


LOADS = pytest.mark.parametrize("loading", [load, load_in_background, load_into])


def refused(location: Path, abstract: Any, loading: Callable[..., Any] = load, **options: Any) -> TreeMismatchError:
    with pytest.raises(TreeMismatchError) as caught:
        loading(location, abstract, **options)
    return caught.value


@LOADS
def test_unexpected_leaves_are_ignored_only_if_allowed(tmp_path: Path, loading: Callable[..., Any]) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONES, "b": ONES, "step": 3})
    error = refused(tmp_path / "c", wanted("w"), loading)
    assert error.differences == (
        "unexpected: b is stored and not requested",
        "unexpected: step is stored and not requested",
    )
    assert 'Matching(unexpected="ignore")' in str(error)
    report = LoadReport()
    loaded = loading(tmp_path / "c", wanted("w"), matching=Matching(unexpected="ignore"), report=report)
    assert list(loaded) == ["w"] and loaded["w"].tolist() == [1, 1, 1]
    assert (list(report.restored), list(report.ignored)) == (["w"], ["b", "step"]) and report.bytes_read >= 12


def test_missing_leaves_become_placeholders_only_if_allowed(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONES})
    assert refused(tmp_path / "c", wanted("w", "b")).differences == ("missing: b is not stored",)
    report = LoadReport()
    loaded = ckptcore.load(tmp_path / "c", wanted("w", "b"), matching=Matching(missing="placeholder"), report=report)
    assert loaded["b"] is PLACEHOLDER and loaded["w"].tolist() == [1, 1, 1]
    assert (list(report.restored), list(report.defaulted), list(report.skipped)) == (["w"], ["b"], [])
    with pytest.raises(ValueError, match="keep"):
        ckptcore.load_into(tmp_path / "c", {"w": np.zeros(3, np.float32)}, matching=Matching(missing="placeholder"))


def test_missing_leaves_that_become_placeholders_cause_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckptcore.save(tmp_path / "c", {"model": {"w": ONES}, "moments": {"m": ONES}})
    abstract = {"model": wanted("w"), "moments": wanted("mu", "nu")}
    with caplog.at_level(logging.WARNING, "ckptcore"):
        ckptcore.load(tmp_path / "c", abstract, matching=Matching(missing="placeholder", unexpected="ignore"))
    assert not caplog.records


def test_missing_leaves_keep_the_value_of_the_abstract_tree(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONES})
    own = np.full(2, 7.0)
    asked: dict[str, Any] = {"w": np.zeros(3, np.float32), "head": own, "step": 5, "name": "run"}
    keep, report = Matching(missing="keep"), LoadReport()
    assert len(refused(tmp_path / "c", asked).differences) == 3
    loaded = ckptcore.load(tmp_path / "c", asked, matching=keep, report=report)
    assert loaded["head"] is own and own.tolist() == [7, 7] and (loaded["step"], loaded["name"]) == (5, "run")
    assert asked["w"].tolist() == [0, 0, 0] and loaded["w"].tolist() == [1, 1, 1]
    assert list(report.defaulted) == ["head", "step", "name"]
    into = ckptcore.load_into(tmp_path / "c", asked, matching=keep)
    assert into is asked and into["head"] is own and own.tolist() == [7, 7] and into["w"].tolist() == [1, 1, 1]


def test_missing_leaves_without_a_value_are_refused(tmp_path: Path) -> None:
    import jax
    import torch

    ckptcore.save(tmp_path / "c", {"w": ONES})
    for valueless in (
        AbstractArray((2,), "int8"),
        jax.ShapeDtypeStruct((2,), "float32"),  # type: ignore[no-untyped-call]  # JAX leaves it untyped
        torch.empty(2, device="meta"),
    ):
        error = refused(tmp_path / "c", {**wanted("w"), "head": valueless}, matching=Matching(missing="keep"))
        (told,) = error.differences
        assert told.startswith("missing: head is not stored, and the abstract leaf has no value to keep: ")
        assert 'Matching(missing="placeholder")' in str(error)
    for own in (jax.numpy.ones(2), torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        kept = ckptcore.load(tmp_path / "c", {**wanted("w"), "head": own}, matching=Matching(missing="keep"))
        assert kept["head"] is own


def test_lists_and_tuples_differ_unless_either_is_allowed(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": (ONES, [1, 2]), "b": {"c": [ONES]}, "d": Pair(1, (2,)), "e": ()})
    leaf = AbstractArray((3,), "float32")
    other = {"a": [leaf, (0, 0)], "b": {"c": (leaf,)}, "d": Pair(0, [0]), "e": []}
    error = refused(tmp_path / "c", other)
    assert error.differences == (
        "a: sequence: a list is requested, a tuple is stored",
        "a[1]: sequence: a tuple is requested, a list is stored",
        "b/c: sequence: a tuple is requested, a list is stored",
        "d.b: sequence: a list is requested, a tuple is stored",
        "e: sequence: a list is requested, a tuple is stored",
    )
    assert 'sequences="either"' in str(error)
    loaded = ckptcore.load(tmp_path / "c", other, matching=Matching(sequences="either"))
    assert type(loaded["a"]) is list and loaded["a"][1] == (1, 2) and loaded["d"] == Pair(1, [2]) and loaded["e"] == []
    # Leaves that are not requested may differ. The abstract tree of a checkpoint requests all its leaves.
    assert ckptcore.load(tmp_path / "c", {"a": PLACEHOLDER, "b": PLACEHOLDER, "d": PLACEHOLDER, "e": ()})
    assert ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract)["d"] == {"a": 1, "b": (2,)}


def test_one_readable_error_lists_all_differences(tmp_path: Path) -> None:
    stored = {f"layers.{number}.attention.weight": ONES for number in range(500)}
    ckptcore.save(tmp_path / "c", {**stored, **{f"x{n}": np.ones(2) for n in range(50)}, **dict.fromkeys("abcd", 1)})
    asked: dict[str, Any] = {name.replace("attention.weight", "attn.weight"): ONES for name in stored}
    asked |= {f"x{number}": np.ones(3 if number % 2 else 2, "f4") for number in range(50)}
    asked |= dict.fromkeys("abcd", "text")
    began = time.monotonic()
    error = refused(tmp_path / "c", asked, matching=Matching(values="error"))
    assert time.monotonic() - began < 20  # a quadratic comparison takes minutes
    assert len(error.differences) == 1079
    assert "missing: ['layers.117.attn.weight'] is not stored; did you mean ['layers.117.attention.weight']?" in (
        error.differences
    )
    lines = str(error).splitlines()
    assert "(1079 differences: 500 missing, 500 unexpected, 50 dtype, 25 shape, 4 kind)" in lines[0]
    assert len(lines) < 40 and max(map(len, lines)) < 600
    for sort in ("missing: ", "unexpected: ", ": shape: ", ": dtype: ", ": kind: "):
        assert sum(sort in line for line in lines) >= 4
    assert "  and 25 more: shape" not in lines and any("more: missing" in line for line in lines)


def test_errors_about_very_long_names_are_short() -> None:
    from ckptcore import select, transforms
    from ckptcore.errors import TransformError

    names = [letter * 100_000 for letter in "abcdefgh"]
    ckptcore.save("memory://differences/long", dict.fromkeys(names, 1), overwrite="non-atomic")
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load("memory://differences/long", {name + "x": 1 for name in names})
    assert len(str(caught.value)) < 20_000 and len(caught.value.differences[0]) > 100_000
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load("memory://differences/long", select=select.names(*[name + "x" for name in names]))
    assert len(str(caught.value)) < 20_000
    for transform in (
        transforms.Cast("*", "int8"),
        transforms.Stack("{i}", "all"),
        transforms.Rename(names[0], names[1]),
    ):
        with pytest.raises(TransformError) as refused_by:
            ckptcore.load("memory://differences/long", transforms=[transform])
        assert len(str(refused_by.value)) < 20_000


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("params/wieght", ["params/bias", "params/weight"], "params/weight"),
        ("a", ["b", "c"], None),
        ("layers[7].kernel", [f"layers[{n}].kernels" for n in range(500)], "layers[7].kernels"),
        ("layers[7].kernel", [f"blocks{n}" for n in range(500)], None),
        ("x" * 400, ["x" * 399], None),
    ],
)
def test_the_nearest_name_is_suggested(name: str, names: list[str], expected: str | None) -> None:
    assert NameSuggestions(names).nearest(name) == expected


def test_near_names_take_bounded_time() -> None:
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(20_000)]
    near = NameSuggestions(names)
    began = time.monotonic()
    suggestions = [near.nearest(name.replace("self_attn", "attention")) for name in names]
    assert time.monotonic() - began < 60
    assert suggestions[:1000].count(None) < 100 and set(suggestions[1000:]) == {None}


@pytest.mark.parametrize(
    "options", [{"unexpected": "skip"}, {"missing": "zeros"}, {"missing": None}, {"sequences": True}]
)
def test_unknown_choices_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"Matching\({name}=.*expected one of '"):
        Matching(**options)


def test_the_error_suggests_each_option_once(tmp_path: Path) -> None:
    stored = {"a": np.ones(4, "f2"), "b": np.ones(4), "c": np.ones(4, "f4"), "d": np.ones((4, 2), "f4"), "e": ONES}
    ckptcore.save(tmp_path / "c", stored)
    asked = {
        "a": AbstractArray((4,), "float32"),
        "b": AbstractArray((4,), "float32"),
        "c": AbstractArray((2, 2), "float32"),
        "d": AbstractArray((3, 3), "float32"),
        "e": AbstractArray((3,), "float32"),
        "new": AbstractArray((3,), "float32"),
        "own": np.ones(2),
    }
    told = str(refused(tmp_path / "c", asked))
    assert 'Matching(missing="keep", cast="narrowing", shapes={"pad", "reshape", "truncate"})' in told
    told = str(refused(tmp_path / "c", asked, matching=Matching(missing="keep")))
    assert 'Matching(missing="placeholder", cast="narrowing", shapes={"pad", "reshape", "truncate"})' in told
    code = told.rpartition("matching=")[2].partition(": ")[0]
    matching = eval(code, {"Matching": Matching})  # the suggestion is valid code
    assert ckptcore.load(tmp_path / "c", asked, matching=matching)["new"] is PLACEHOLDER


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"matching": "safe"}, r"matching='safe': expected a ckptcore\.Matching"),
        ({"matching": {"cast": "safe"}}, r"expected a ckptcore\.Matching"),
        ({"report": {}}, r"report=\{\}: expected a ckptcore\.results\.LoadReport"),
        ({"report": LoadReport}, r"expected a ckptcore\.results\.LoadReport"),
    ],
)
@LOADS
def test_options_of_wrong_types_are_refused(
    tmp_path: Path, loading: Callable[..., Any], options: dict[str, Any], told: str
) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONES})
    with pytest.raises(TypeError, match=told):
        loading(tmp_path / "c", wanted("w"), **options)


def test_a_report_is_filled_only_by_a_load_that_succeeds(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONES, "b": [ONES, 2]})
    report = LoadReport()
    refused(tmp_path / "c", wanted("w"), report=report)
    assert report == LoadReport()
    ckptcore.load(tmp_path / "c", report=report)
    assert list(report.restored) == ["w", "b[0]", "b[1]"] and report.bytes_read >= 24
    ckptcore.load(tmp_path / "c", {"w": ONES, "b": PLACEHOLDER}, report=report)
    assert (list(report.restored), list(report.skipped)) == (["w"], ["b"])
    assert str(report) == f"1 leaves restored, {report.bytes_read} bytes read\nskipped: b"


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_bytes_read_counts_compressed_bytes(tmp_path: Path, compression: Any) -> None:
    from ckptcore_orbax import Zarr3Layout

    state = {name: np.random.default_rng(0).integers(0, 16, 1 << 18).astype(np.uint8) for name in "ab"}
    ckptcore.save(tmp_path / "c", state, layout=Zarr3Layout(compression=compression))
    report = LoadReport()
    asked = {"a": state["a"], "b": PLACEHOLDER}
    ckptcore.load(tmp_path / "c", asked, report=report)
    stored = sum(record.size for key, record in ckptcore.metadata(tmp_path / "c").objects.items() if "a/c" in key)
    # The CRC of an uncompressed chunk, 4 bytes, is in a block of its own, which no element needs.
    assert 1 << 16 < stored - 4 <= report.bytes_read <= 1.1 * stored
    assert (stored < 1 << 18) == (compression is not None)


def test_steps_of_a_run_accept_matching_and_report(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": ONES, "b": 2})
        run.wait()
        report, less = LoadReport(), Matching(unexpected="ignore", cast="narrowing")
        with pytest.raises(TreeMismatchError):
            run.load(abstract={"w": AbstractArray((3,), "float16")})
        assert run.load(abstract={"w": AbstractArray((3,), "float16")}, matching=less, report=report)["w"].tolist() == [
            1, 1, 1,
        ]  # fmt: skip
        assert (list(report.changed), list(report.ignored)) == (["w"], ["b"])
        target = {"w": np.zeros(3, np.float16)}
        assert run.load_into(target, matching=less, report=report) is target and target["w"].tolist() == [1, 1, 1]
