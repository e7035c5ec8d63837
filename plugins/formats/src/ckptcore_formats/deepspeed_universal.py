"""Universal checkpoints of DeepSpeed: a file for each parameter and state, of any parallelism.

``ds_to_universal.py`` writes ``zero/NAME/fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``,
``zero/optimizer_state.pt``, and copies of the files of the model. A file has ``{"param": tensor, ...}``
with the whole parameter, or, from ZeRO 3, the bare tensor without its shape (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Key
from ckptcore.protocols import ReadStore
from ckptcore_formats.assembly import RESTORE, Entry, Part, PartReader, Refused
from ckptcore_formats.deepspeed_zero import PARTITIONS, Weights, named_groups, rest_of

_SUFFIX: Final = ".pt"
_WEIGHT: Final = "fp32"
_MAX_DEPTH: Final = 8
"""Most directories within each other. The name of a parameter has no slash in practice."""


def read_universal(reader: PartReader, directory: str, models: Sequence[Part], weights: Weights) -> Entry:
    """Return the state as one tree, as for other checkpoints of DeepSpeed.

    Args:
        reader: the files.
        directory: prefix of the keys of the files of parameters.
        models: the files of the model, one of each process if ZeRO 3 wrote them.
        weights: names and shapes in the first of them.
    """
    values: dict[str, Entry] = {}
    states: dict[Key, dict[Key, Entry]] = {}
    shapes = weights.shapes
    for name, kind, key in _files(reader.store, directory, "", 0):
        path = f"module/{name}" if kind == _WEIGHT else f"optimizer/state/{name}/{kind}"
        entry = _value(reader.read(key), shapes.get(name), path)
        if kind == _WEIGHT:
            values[name] = entry
        else:
            states.setdefault(name, {})[kind] = entry
    for name, kind in _missing([*shapes], values, states):
        key = f"{directory}{name}/{kind}{_SUFFIX}"
        lost = Refused(CorruptCheckpointError(f"{key} is missing: the checkpoint is incomplete; {RESTORE}", key=key))
        (values if kind == _WEIGHT else states.setdefault(name, {}))[name if kind == _WEIGHT else kind] = lost
    optimizer: dict[Key, Entry] = {"state": dict(states)}
    if f"optimizer_state{_SUFFIX}" in reader.store.list_names(directory):
        found = reader.read(f"{directory}optimizer_state{_SUFFIX}").children()
        groups = found.get("param_groups")
        optimizer["param_groups"] = [] if groups is None else named_groups([groups], [*map(list, weights.groups)])
        optimizer.update([(key, part) for key, part in found.items() if key not in PARTITIONS])
    module = weights.module({**values, **weights.frozen_in_slices(models)})
    return {"module": module, "optimizer": optimizer, **rest_of(models)}


def _missing(
    trained: Sequence[str], values: Mapping[str, Entry], states: Mapping[Key, Mapping[Key, Entry]]
) -> Iterator[tuple[str, str]]:
    """Return the files of parameters that are missing: the name, and the kind of the state.

    A trained parameter has a weight. It has the states of another parameter if it has some of these or none: with
    several optimizers in one, such as Muon, parameters have different ones.
    """
    kinds = sorted({frozenset(state) for state in states.values()}, key=len, reverse=True)
    for name in dict.fromkeys([*trained, *map(str, states)]):
        if name not in values:
            yield name, _WEIGHT
        own = frozenset(states.get(name, ()))
        expected = next((one for one in kinds if own < one), frozenset())
        for kind in sorted(map(str, expected - own)):
            yield name, kind


def _files(store: ReadStore, directory: str, name: str, depth: int) -> Iterator[tuple[str, str, str]]:
    """Return the name of a parameter, the kind of the state, and the key, for each file of a parameter."""
    for found in store.list_names(f"{directory}{name}"):
        if found.endswith("/") and depth < _MAX_DEPTH:
            yield from _files(store, directory, name + found, depth + 1)
        elif name and found.endswith(_SUFFIX):
            yield name[:-1], found.removesuffix(_SUFFIX), f"{directory}{name}{found}"


def _value(part: Part, shape: tuple[int, ...] | None, path: str) -> Entry:
    """Return the value of a file. A bare tensor gets the shape of its parameter."""
    children = part.children()
    if "param" in children:
        return children["param"]
    tensor = part.tensor
    if tensor is None or shape is None or tensor.shape == shape or not tensor.shape:
        return part
    if math.prod(tensor.shape) != math.prod(shape) or not tensor.is_contiguous:
        return Refused(
            CorruptCheckpointError(
                f"{path} has {math.prod(tensor.shape)} elements in {part.key}, but its shape is {list(shape)}: "
                f"{RESTORE}",
                key=part.key,
            )
        )
    return replace(part, leaves=(replace(tensor, shape=shape, strides=_c_strides(shape)),))


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
