"""Conformance tests of layouts that store differences from a base."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import ckptcore
from ckptcore.commit.root_json import bases_of_root
from ckptcore.errors import CheckpointError, CheckpointReferredError, CorruptCheckpointError
from ckptcore.model import ArraySpec, HostArray
from ckptcore_testing.arrays import DTYPE_NAMES, assert_same_bits, bit_patterns
from ckptcore_testing.cases import refused
from ckptcore_testing.hostile_json import sealed, tampered

_CONTEXT: Final = ckptcore.Context(durability="none")
_ROOT: Final = "checkpoint.json"


class LayoutChainTests:
    """Conformance tests of `Layout.base` and `Layout.derive`. Subclass it and define `save`.

    Versions are directories ``v0``, ``v1`` and so on, of which each but the first is stored as differences from the one
    before.

    Attributes:
        refused_dtypes: dtypes that the layout refuses.
        tampered_roots: approximate number of tampered roots to test.
    """

    refused_dtypes: Collection[str] = ()
    tampered_roots: int = 150

    def save(self, location: str, state: Mapping[str, Any], base: tuple[str, Mapping[str, Any]]) -> None:
        """Save a state as differences from a base.

        Args:
            location: where to save it, next to the base.
            state: a dict of arrays and values.
            base: the location and the state of the base.
        """
        raise NotImplementedError("define the method `save`")

    def _chain(self, directory: Path, states: list[dict[str, Any]]) -> str:
        """Save states as versions. Return the location of the last."""
        ckptcore.save(f"{directory}/v0", states[0], context=_CONTEXT)
        for number, state in enumerate(states[1:], start=1):
            self.save(f"{directory}/v{number}", state, (f"{directory}/v{number - 1}", states[number - 1]))
        return f"{directory}/v{len(states) - 1}"

    # --- reading back

    def test_every_version_of_a_chain_comes_back(self, tmp_path: Path) -> None:
        """Arrays change a little, entirely or not at all. Some are new, are missing, or get another shape or dtype."""
        states = [_state(number) for number in range(7)]
        self._chain(tmp_path, states)
        for number, state in enumerate(states):
            _assert_equal(_load(f"{tmp_path}/v{number}"), state, f"v{number}")

    def test_every_dtype_comes_back(self, tmp_path: Path) -> None:
        names = [name for name in DTYPE_NAMES if name not in self.refused_dtypes]
        states = [{name: _changed(name, number) for name in names} for number in range(3)]
        _assert_equal(_load(self._chain(tmp_path, states)), states[2], "v2")

    def test_arrays_may_be_tied_and_untied(self, tmp_path: Path) -> None:
        """Versions between may store one array for both, and differences from either."""
        first, second = np.arange(3000, dtype=np.int32), np.arange(3000, dtype=np.int32) * 2
        changed = first.copy()
        changed[7] = -1
        states: list[dict[str, Any]] = [
            {"a": first, "b": second},
            {"a": first, "b": first},
            {"a": changed, "b": changed},
            {"a": changed, "b": changed.copy()},
            {"a": changed, "b": first},
        ]
        self._chain(tmp_path, states)
        for number, state in enumerate(states):
            _assert_equal(_load(f"{tmp_path}/v{number}"), state, f"v{number}")

    def test_a_long_chain_comes_back(self, tmp_path: Path) -> None:
        states = []
        weights = np.zeros((40, 30), np.float32)
        for number in range(51):
            weights = weights.copy()
            weights[number % 40, :5] += number
            states.append({"weights": weights, "number": number})
        last = self._chain(tmp_path, states)
        _assert_equal(_load(last), states[-1], last)
        assert ckptcore.verify(last).ok

    def test_boxes_of_arrays_come_back(self, tmp_path: Path) -> None:
        states = [{"w": _weights(300, 200, number)} for number in range(4)]
        arrays = ckptcore.open(self._chain(tmp_path, states), context=_CONTEXT)
        choices = random.Random(3)
        for _ in range(20):
            rows, columns = sorted(choices.sample(range(301), 2)), sorted(choices.sample(range(201), 2))
            part = arrays["w"][rows[0] : rows[1], columns[0] : columns[1]]
            assert_same_bits(part, states[3]["w"][rows[0] : rows[1], columns[0] : columns[1]], f"{rows} {columns}")

    def test_a_copy_needs_no_base(self, tmp_path: Path) -> None:
        states = [_state(number) for number in range(3)]
        ckptcore.copy(self._chain(tmp_path / "chain", states), tmp_path / "copy", context=_CONTEXT)
        _assert_equal(_load(f"{tmp_path}/copy"), states[2], "copy")
        assert ckptcore.verify(tmp_path / "copy").ok

    def test_an_update_can_refer_to_a_version(self, tmp_path: Path) -> None:
        states = [_state(number) for number in range(3)]
        last = self._chain(tmp_path, states)
        update = {"new value": np.arange(7)}
        ckptcore.save(tmp_path / "update", update, strategy=ckptcore.Update(base=last), context=_CONTEXT)
        _assert_equal(_load(f"{tmp_path}/update"), {**states[2], **update}, "update")
        assert ckptcore.verify(tmp_path / "update").ok

    # --- bases

    def test_a_base_is_protected_while_a_version_needs_it(self, tmp_path: Path) -> None:
        self._chain(tmp_path, [_state(number) for number in range(3)])
        with pytest.raises(CheckpointReferredError, match="v1"):
            ckptcore.delete(tmp_path / "v0", context=_CONTEXT)
        assert [base.path for base in bases_of_root((tmp_path / "v2" / _ROOT).read_bytes())] == ["v1"]
        for number in (2, 1, 0):
            ckptcore.delete(tmp_path / f"v{number}", context=_CONTEXT)

    def test_a_missing_base_is_named(self, tmp_path: Path) -> None:
        last = self._chain(tmp_path, [_state(number) for number in range(4)])
        (tmp_path / "v1").rename(tmp_path / "elsewhere")
        refused(lambda: _load(last), "v2", "v1", error=CorruptCheckpointError)
        assert "v1" in ckptcore.verify(last).problems[0].message

    def test_a_replaced_base_is_named(self, tmp_path: Path) -> None:
        states = [_state(number) for number in range(4)]
        last = self._chain(tmp_path, states)
        ckptcore.save(tmp_path / "v1", states[1], overwrite=True, context=_CONTEXT)
        refused(lambda: _load(last), "v1", error=CorruptCheckpointError)

    def test_a_version_that_needs_itself_is_refused(self, tmp_path: Path) -> None:
        states = [_state(number) for number in range(3)]
        last = self._chain(tmp_path, states)
        shutil.rmtree(tmp_path / "v0")
        shutil.copytree(last, tmp_path / "v0")
        refused(lambda: _load(last), "v0", error=CorruptCheckpointError)

    # --- damage

    def test_a_damaged_version_is_noticed(self, tmp_path: Path) -> None:
        states = [_state(number) for number in range(3)]
        last = self._chain(tmp_path, states)
        choices = random.Random(2)
        for directory in ("v1", "v2"):
            for file in sorted((tmp_path / directory).iterdir()):
                content = file.read_bytes()
                for _ in range(5):
                    changed = bytearray(content)
                    changed[choices.randrange(len(changed))] ^= choices.randrange(1, 256)
                    file.write_bytes(changed)
                    with pytest.raises(CheckpointError):
                        _load(last)
                    assert not ckptcore.verify(last).ok
                file.write_bytes(content)
        _assert_equal(_load(last), states[2], last)

    def test_a_damaged_base_is_noticed(self, tmp_path: Path) -> None:
        last = self._chain(tmp_path, [_state(number) for number in range(3)])
        for file in sorted((tmp_path / "v0").iterdir()):
            content = file.read_bytes()
            file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            with pytest.raises(CheckpointError):
                _load(last)
            assert not ckptcore.verify(last).ok
            file.write_bytes(content)

    def test_a_tampered_root_raises_no_other_error(self, tmp_path: Path) -> None:
        last = self._chain(tmp_path, [_state(number) for number in range(3)])
        path = tmp_path / "v2" / _ROOT
        root = json.loads(path.read_bytes())
        state = root["tables"]["layout"]
        for hostile in tampered(state, self.tampered_roots):
            path.write_bytes(sealed({**root, "tables": {**root["tables"], "layout": hostile}}))
            try:
                _load(last)
            except CheckpointError:
                continue


def _load(location: str) -> Any:
    return ckptcore.load(location, context=_CONTEXT)


def _weights(rows: int, columns: int, number: int) -> HostArray:
    """Return weights of which about 3 % change from number to number."""
    weights = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    for step in range(1, number + 1):
        at = np.random.default_rng(step).random(weights.shape) < 0.03
        weights[at] *= np.float32(1 + 1e-6)
    return weights


def _changed(dtype: str, number: int) -> HostArray:
    """Return an array of a dtype, of which some elements change from number to number."""
    spec = ArraySpec((13, 9), dtype)
    array = bit_patterns(spec).copy()
    for step in range(1, number + 1):
        array[step::5] = bit_patterns(spec, step)[step::5]
    return array


def _state(number: int) -> dict[str, Any]:
    """Return the state of a version."""
    tied = np.arange(20.0) + number
    state: dict[str, Any] = {
        "weights": _weights(130, 70, number),
        "frozen": np.ones((50, 3), np.int16),
        "replaced": np.random.default_rng(number).standard_normal(500),
        "scalar": np.array(number, np.float16),
        "empty": np.zeros((0, 5), np.float32),
        "tied": tied,
        "also tied": tied,
        "number": number,
        "layers": [{"w": _weights(10, 10, number), "name": f"layer {number}"}],
    }
    if number != 2:
        state["sometimes"] = np.arange(30) + number
    if number >= 3:
        state["new"] = np.full((40, 40), number, np.float32)
    shape, dtype = ((6, 8), np.float32) if number < 4 else ((8, 6), np.float32) if number < 5 else ((8, 6), np.float64)
    state["reshaped"] = np.full(shape, 7, dtype)
    if number >= 5:
        state["also tied"] = tied + 1  # no longer tied
    return state


def _assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{where}: expected {list(expected)}, found {list(found)}"
        for key, value in expected.items():
            _assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            _assert_equal(found[number], value, f"{where}/{number}")
    elif isinstance(expected, np.ndarray):
        assert_same_bits(np.asarray(found), expected, where)
    else:
        assert found == expected, f"{where}: expected {expected!r}, found {found!r}"
