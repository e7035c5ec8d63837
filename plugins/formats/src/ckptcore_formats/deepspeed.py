"""The layout `deepspeed`: DeepSpeed checkpoints of any ZeRO stage, and universal checkpoints. Read-only.

Formats (DeepSpeed 0.14.5, 0.16.9 and 0.19.8: ``runtime/engine.py``, ``runtime/zero``,
``runtime/bf16_optimizer.py``, ``utils/zero_to_fp32.py`` and ``checkpoint/ds_to_universal.py``).
ZeRO 1 and 2: the parameters of a group are one flat vector, and each process saves a slice of it.
ZeRO 3: each process saves its slices of all parameters, one after another. The names and shapes are in the model file.
The tree is ``{"module": {name: array}, "optimizer": {"state": {name: {...}}, "param_groups": [...], ...}, ...}``, with
the rest of the state next to these keys.

Universal checkpoints do not depend on the parallelism of the job. They have a file for each parameter and state:
``ds_to_universal.py`` writes ``zero/NAME/fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``,
``zero/optimizer_state.pt``, and copies of the model files. A file contains ``{"param": tensor, ...}`` with the whole
parameter. If it was converted from ZeRO 3, it contains only the flat tensor, without its shape (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import Key
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_formats.assembly import (
    RESTORE,
    AssembledLayout,
    Entry,
    Part,
    PartReader,
    Refused,
    has_weights,
    inspection_of,
)
from ckptcore_formats.deepspeed_zero import PARTITIONS, Weights, Zero, named, named_groups, rest_of

_SUFFIX: Final = ".pt"
_WEIGHT: Final = "fp32"
_MAX_DEPTH: Final = 8
"""Maximum nesting of directories. A parameter name creates several only if it contains slashes, which is rare."""


def read_universal(reader: PartReader, directory: str, models: Sequence[Part], weights: Weights) -> Entry:
    """Return the state as one tree, as for other checkpoints of DeepSpeed.

    Args:
        reader: the files.
        directory: key prefix of the parameter files.
        models: the model files; one per process if ZeRO 3 wrote them.
        weights: names and shapes from the first model file.
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
        optimizer_state = reader.read(f"{directory}optimizer_state{_SUFFIX}").children()
        groups = optimizer_state.get("param_groups")
        optimizer["param_groups"] = [] if groups is None else named_groups([groups], [*map(list, weights.groups)])
        optimizer.update([(key, part) for key, part in optimizer_state.items() if key not in PARTITIONS])
    module = weights.module({**values, **weights.frozen_in_slices(models)})
    return {"module": module, "optimizer": optimizer, **rest_of(models)}


def _missing(
    trained: Sequence[str], values: Mapping[str, Entry], states: Mapping[Key, Mapping[Key, Entry]]
) -> Iterator[tuple[str, str]]:
    """Yield the parameter name and the kind of state of each missing file.

    Every trained parameter must have a weight. If another parameter has the same states and additional ones, the
    additional states count as missing. Parameters with unrelated states are valid: an optimizer such as Muon combines
    several optimizers, which have different states.
    """
    kinds = sorted({frozenset(state) for state in states.values()}, key=len, reverse=True)
    for name in dict.fromkeys([*trained, *map(str, states)]):
        if name not in values:
            yield name, _WEIGHT
        own = frozenset(states.get(name, ()))
        expected = next((rank for rank in kinds if own < rank), frozenset())
        for kind in sorted(map(str, expected - own)):
            yield name, kind


def _files(store: ReadStore, directory: str, name: str, depth: int) -> Iterator[tuple[str, str, str]]:
    """Yield the parameter name, the kind of state and the key of each parameter file."""
    for child in store.list_names(f"{directory}{name}"):
        if child.endswith("/") and depth < _MAX_DEPTH:
            yield from _files(store, directory, name + child, depth + 1)
        elif name and child.endswith(_SUFFIX):
            yield name[:-1], child.removesuffix(_SUFFIX), f"{directory}{name}{child}"


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


_OPTIM: Final = re.compile(
    r"((?:bf16_|fp16_)?zero_pp_rank_)([0-9]{1,9})(_mp_rank_([0-9]{1,9})_optim_states\.pt)", re.ASCII
)
_ZERO_MODEL: Final = re.compile(r"(zero_pp_rank_)([0-9]{1,9})(_mp_rank_([0-9]{1,9})_model_states\.pt)", re.ASCII)
_MODEL: Final = re.compile(r"mp_rank_([0-9]{1,9})_model_states\.pt", re.ASCII)
_LAYER: Final = re.compile(r"layer_[0-9]+-(model_[0-9]+-)?model_states\.pt", re.ASCII)
_EXPERT: Final = re.compile(r"(layer_[0-9]+_)?expert_[0-9]+_mp_rank_[0-9]+_model_states\.pt|expp_rank_.*", re.ASCII)
_POINTERS: Final = ("latest", "latest_universal")
_OTHERS: Final = (*_POINTERS, "zero_to_fp32.py")
_MAX_POINTER: Final = 4096
_CONVERT: Final = (
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, and load the result, or load the file of one rank by "
    "its own path"
)


class DeepSpeedLayout(AssembledLayout):
    """Directories of DeepSpeed: ``global_stepN``, or their parent directory with ``latest``. Read-only."""

    name = "deepspeed"

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a directory by the names of its rank files. See the module.

        If the directory has no such files, ``latest`` may name a subdirectory that has them. A directory with weights
        in another format is not recognised.

        Raises:
            CorruptCheckpointError: the file of a rank is missing, or the partitions do not match the parameters.
            UnsupportedLeafError: the model is divided between pipeline stages, tensor parallel ranks or experts.
        """
        if entry is not None:
            return None
        names = store.list_names("")
        directory = ""
        if has_weights(names):
            return None  # other software, such as the Trainer, wrote it, and another layout reads it
        if not _is_checkpoint(names):
            latest = _named_by_pointer(store, names)
            if latest is None or not _is_checkpoint(names := store.list_names(latest)):
                return None
            directory = latest
        reader = PartReader(store)
        tree = _Directory.of(reader, directory, names).tree()
        own = [directory + name for name in names if _is_own(name)]
        return inspection_of(tree, "DeepSpeed", {*reader.keys, *own})

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the files that DeepSpeed wrote, or none if there are several steps: each step is a checkpoint."""
        own = [key for key in keys if _is_own_key(key.split("/"))]
        return own if len({key.partition("/")[0] for key in own if "/" in key} - {"zero"}) < 2 else ()


def _is_own(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_OPTIM, _ZERO_MODEL, _MODEL, _LAYER, _EXPERT))


def _is_own_key(parts: Sequence[str]) -> bool:
    """Return True if DeepSpeed writes files with this key, relative to a step's directory or to its parent."""
    *directories, name = parts
    return "zero" in directories[:2] or (len(directories) < 2 and (name in _OTHERS or _is_own(name)))


def _is_checkpoint(names: Collection[str]) -> bool:
    return any(_is_own(name) for name in names)


def _named_by_pointer(store: ReadStore, names: Sequence[str]) -> str | None:
    """Return the directory that ``latest`` names, with a trailing slash, or None if it does not exist."""
    for pointer in _POINTERS:
        if pointer in names:
            name = store.get(pointer, 0, _MAX_POINTER).decode("utf-8", "replace").strip() + "/"
            return name if name in names else None
    return None


@dataclass(frozen=True, slots=True)
class _Directory:
    """The files of a checkpoint.

    Attributes:
        reader: the files.
        directory: prefix of their keys.
        model: the file of the model, or the first of them.
        models: with ZeRO 3, the model files by data parallel rank; else empty.
        optimizers: the optimizer files by data parallel rank.
        parallel: number of tensor parallel ranks and pipeline stages.
        is_universal: True if there is a directory ``zero`` with a file for each parameter and state.
    """

    reader: PartReader
    directory: str
    model: str
    models: Mapping[int, str]
    optimizers: Mapping[int, str]
    parallel: int
    is_universal: bool

    @classmethod
    def of(cls, reader: PartReader, directory: str, names: Sequence[str]) -> _Directory:
        """Classify file names. Reject a model that is divided by other methods than ZeRO.

        Raises:
            CorruptCheckpointError: there is no model file.
            UnsupportedLeafError: see `DeepSpeedLayout.inspect`.
        """
        files: dict[str, dict[tuple[int, int], str]] = {"optim": {}, "zero": {}, "model": {}}
        for name in names:
            if match := _OPTIM.fullmatch(name):
                files["optim"][int(match[4]), int(match[2])] = directory + name
            elif match := _ZERO_MODEL.fullmatch(name):
                files["zero"][int(match[4]), int(match[2])] = directory + name
            elif match := _MODEL.fullmatch(name):
                files["model"][int(match[1]), 0] = directory + name
        models = files["zero"] or files["model"]
        within = directory or "the directory"
        is_universal = "zero/" in names
        parallel = {rank for rank, _ in (*models, *files["optim"])}
        if not is_universal:
            for pattern, what in ((_EXPERT, "experts"), (_LAYER, "pipeline stages")):
                if first := next((name for name in names if pattern.fullmatch(name)), None):
                    raise UnsupportedLeafError(
                        f"{within} has a model that is divided into {what} ({first}): {_CONVERT}"
                    )
            if parallel - {0}:
                raise UnsupportedLeafError(
                    f"{within} has a model divided between {max(parallel) + 1} tensor parallel ranks or pipeline "
                    f"stages: {_CONVERT}"
                )
        if not models:
            raise CorruptCheckpointError(
                f"{within} has files of DeepSpeed's optimizer, but mp_rank_00_model_states.pt, which names the "
                f"parameters, is missing: {RESTORE}"
            )
        ranks = {rank: key for (_, rank), key in sorted(files["zero"].items(), reverse=True)}
        optimizers = {rank: key for (_, rank), key in files["optim"].items()}
        return cls(reader, directory, models[min(models)], ranks, optimizers, len(parallel), is_universal)

    def tree(self) -> Entry:
        """Return the state as one tree."""
        model = self.reader.read(self.model)
        state = named(model)
        weights = Weights(model.key, state, self.parallel)
        if self.is_universal:
            return read_universal(self.reader, f"{self.directory}zero/", self._models(model), weights)
        shapes = state.get("param_shapes")
        if not self.optimizers and (shapes is None or shapes.plain() is None):
            return model  # without ZeRO, a single file contains the whole state
        zero = Zero.of(self.reader, self._complete(self.optimizers, _OPTIM, model), weights)
        models = self._models(model) if zero.stage == 3 else [model]
        optimizer: dict[Key, Entry] = {"state": zero.states(), "param_groups": zero.param_groups(), **zero.rest()}
        module = weights.module({**zero.weights(), **weights.frozen_in_slices(models)})
        return {"module": module, "optimizer": optimizer, **rest_of(models)}

    def _models(self, model: Part) -> Sequence[Part]:
        """Return the model files: one per process with ZeRO 3, else a single one."""
        if not self.models:
            return [model]
        files = self._complete(self.models, _ZERO_MODEL, model)
        return [model if key == model.key else self.reader.read(key) for key in files]

    def _complete(self, files: Mapping[int, str], pattern: re.Pattern[str], model: Part) -> Sequence[str]:
        """Return files in the order of their ranks.

        Raises:
            CorruptCheckpointError: the file of a rank is missing.
        """
        stated = named(model)["dp_world_size"].plain() if "dp_world_size" in model.children() else None
        expected = max(stated if type(stated) is int else 1, len(files))
        missing = next((rank for rank in range(len(files) + 1) if rank not in files and rank < expected), None)
        if missing is not None:
            match = pattern.fullmatch(next(iter(files.values())).rpartition("/")[2]) if files else None
            name = f"{match[1]}{missing}{match[3]}" if match else f"zero_pp_rank_{missing}_mp_rank_00_optim_states.pt"
            raise CorruptCheckpointError(
                f"{self.directory}{name} is missing: the checkpoint has files of {len(files)} of {expected} data "
                f"parallel processes; {RESTORE}",
                key=f"{self.directory}{name}",
            )
        return [files[rank] for rank in range(len(files))]
