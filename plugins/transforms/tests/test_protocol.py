"""Transforms and derived arrays of other packages, alone and combined with those of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore import transforms
from ckptcore.errors import TransformError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray, DerivedTree, Part, Transform, TransformedTree


@dataclass(frozen=True, slots=True)
class Negated:
    """A derived array that uses only the protocol."""

    of: DerivedArray

    @property
    def spec(self) -> ArraySpec:
        return self.of.spec

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        return (Part(0, box),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        np.negative(parts[0], out=out)


class Negate:
    """A transform that uses only the protocol, and negates every array."""

    def apply(self, tree: TransformedTree) -> TransformedTree:
        before = tree.finish()
        return before._replace(arrays={number: Negated(array) for number, array in before.arrays.items()})

    def describe(self) -> str:
        return "negate all arrays"


class Loses:
    """A transform whose tree declares an array that it does not return."""

    def apply(self, tree: TransformedTree) -> TransformedTree:
        before = tree.finish()
        assert all(isinstance(record, ArrayRecord) for record in before.tree.leaves)
        return DerivedTree(before.tree, {}, {}, before.source)

    def describe(self) -> str:
        return "lose all arrays"


def _saved(path: Path) -> dict[str, HostArray]:
    state: dict[str, HostArray] = {"l.0.w": np.arange(6.0).reshape(2, 3), "l.1.w": np.ones((2, 3))}
    ckptcore.save(path, state)
    return state


def test_a_transform_of_another_package_is_applied(tmp_path: Path) -> None:
    state = _saved(tmp_path / "c")
    loaded = ckptcore.load(tmp_path / "c", transforms=[Negate()])
    assert all((loaded[name] == -array).all() for name, array in state.items())
    assert transforms.describe([Negate()]) == "1. negate all arrays"


def test_a_transform_of_another_package_can_be_between_ours(tmp_path: Path) -> None:
    state = _saved(tmp_path / "c")
    chain: list[Transform] = [
        transforms.Rename("l.{i}.w", "m.{i}.w"),
        Negate(),
        transforms.Stack("m.{i}.w", "w"),
        transforms.IfPresent(Negate()),
    ]
    loaded = ckptcore.load(tmp_path / "c", transforms=chain)
    assert (loaded["w"] == np.stack(list(state.values()))).all()


def test_a_tree_without_its_arrays_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path / "c")
    with pytest.raises(TransformError, match="its derivation is missing"):
        ckptcore.load(tmp_path / "c", transforms=[Loses()])


def test_a_transform_without_an_inverse_raises_an_error() -> None:
    with pytest.raises(
        TransformError, match="negate all arrays: this transform has no inverse, because Negate has no method inverse"
    ):
        transforms.inverse([Negate()])
