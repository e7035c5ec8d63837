"""ZeRO partitions: arrays assembled from the flat tensors of all processes. See `deepspeed`."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ckptcore_dcp.reading import StoredTensor

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArraySpec, Key
from ckptcore_formats.assembly import RESTORE, Divided, Entry, Part, PartReader, Refused, Run
from ckptcore_formats.flat_vectors import Vector, guarded, in_slices, in_vectors, stored_run
from ckptcore_formats.rank_files import merge_parts

_FLAT_3: Final = "fp32_flat_groups"
_FLAT_12: Final = "single_partition_of_fp32_groups"
_STATE_3: Final = "optimizer_state_dict"
_STATE_12: Final = "base_optimizer_state"
PARTITIONS: Final = frozenset(
    [_FLAT_3, _FLAT_12, _STATE_3, _STATE_12, "group_paddings", "param_alignment_paddings", "partition_count"]
    + ["param_slice_mappings", "param_groups", "zero_stage"]
)
"""Keys of an optimizer file that describe partitions. The tree does not contain them."""
_MODEL_KEYS: Final = frozenset(
    ["module", "optimizer", "param_shapes", "buffer_names", "shared_params"]
    + ["frozen_param_shapes", "frozen_param_fragments"]
)
"""Keys of a model file from which the weights in the tree are built."""


def named(part: Part) -> dict[str, Part]:
    """Return the children whose keys are text."""
    return {key: child for key, child in part.children().items() if isinstance(key, str)}


def rest_of(models: Sequence[Part]) -> Mapping[Key, Entry]:
    """Return all entries of the model files except the weights. State that the program added is included.

    An entry with different values in the processes becomes a leaf that cannot be loaded.
    """
    return _merged([dict(model.items()) for model in models], _MODEL_KEYS)


def _merged(states: Sequence[Mapping[Key, Part]], without: Collection[Key]) -> Mapping[Key, Entry]:
    keys = dict.fromkeys([key for state in states for key in state if key not in without])
    return {key: merge_parts([state[key] for state in states if key in state]) for key in keys}


def _shape(value: object, key: str, path: str) -> tuple[int, ...]:
    """Check and return a shape from a pickle."""
    is_shape = isinstance(value, tuple) and all(type(extent) is int and 0 <= extent < 1 << 62 for extent in value)
    if is_shape and isinstance(value, tuple) and len(value) <= 64 and ArraySpec(value, "complex128").is_possible:
        return value
    raise CorruptCheckpointError(f"{path} has no valid shape in {key}: {str(value)[:80]}; {RESTORE}", key=key)


class Weights:
    """Names and shapes of the parameters, from the model file.

    Attributes:
        key: the file.
        groups: for each group, the shapes of its trained parameters by name, in the order of the flat vector.
    """

    def __init__(self, key: str, state: Mapping[str, Part], parallel: int) -> None:
        """Read names and shapes.

        Args:
            key: the file.
            state: its content.
            parallel: number of tensor parallel ranks and pipeline stages that have their own model file.

        Raises:
            CorruptCheckpointError: a shape is invalid.
        """
        self.key = key
        self._state = state
        self._parallel = parallel
        shapes = state["param_shapes"].plain() if "param_shapes" in state else None
        self.groups: list[dict[str, tuple[int, ...]]] = []
        for group in shapes if isinstance(shapes, tuple) else () if shapes is None else (shapes,):
            if not isinstance(group, dict):
                raise CorruptCheckpointError(f"{key} has no valid shapes of parameters: {RESTORE}", key=key)
            self.groups.append({str(name): _shape(shape, key, f"module/{name}") for name, shape in group.items()})

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}

    @property
    def frozen(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the frozen parameters, by name. Empty if the file does not state them."""
        stated = self._state.get("frozen_param_shapes")
        shapes = {} if stated is None else stated.plain()
        if not isinstance(shapes, dict):
            return {}
        return {str(name): _shape(shape, self.key, f"module/{name}") for name, shape in shapes.items()}

    def frozen_in_slices(self, models: Sequence[Part]) -> Mapping[str, Entry]:
        """Return the frozen parameters of ZeRO 3. The model file of each process contains a slice of each."""
        fragments = [named(model).get("frozen_param_fragments") for model in models]
        slices = [{} if part is None else part.children() for part in fragments]
        entries: dict[str, Entry] = {}
        for name, shape in self.frozen.items():
            path = f"module/{name}"
            parts = [each.get(name) for each in slices]
            tensor = None if parts[0] is None else parts[0].tensor
            if len(parts) == 1 and tensor is not None and tensor.shape == shape:
                continue  # without ZeRO 3: the only file contains the whole parameter
            entries[name] = guarded(lambda: in_slices([stored_run(part, path) for part in parts], shape, path))  # noqa: B023
        return entries

    def module(self, weights: Mapping[str, Entry]) -> Mapping[Key, Entry]:
        """Return weights and buffers by name, in the order of the module.

        Args:
            weights: the weights in full precision. Other parameters, such as frozen ones of ZeRO 1, and buffers are
                taken from the module in the file.
        """
        stored = named(self._state["module"]) if "module" in self._state else {}
        stated = self._state.get("frozen_param_fragments")
        frozen = {} if stated is None else named(stated)
        listed = self._state["shared_params"].plain() if "shared_params" in self._state else None
        shared = listed if isinstance(listed, dict) else {}
        buffers = {name for name in _items(self._state.get("buffer_names")) if isinstance(name, str)}
        entries: dict[Key, Entry] = {}
        for name, part in stored.items():
            # Buffers are taken from the module, because `ds_to_universal` converts them to fp32, even integer counters.
            if name in weights and name not in buffers:
                entries[name] = weights[name]
            elif name in buffers or part.tensor is None:
                entries[name] = part
            elif self._parallel > 1:
                entries[name] = Refused(
                    UnsupportedLeafError(
                        f"it is in the files of the model only, of {self._parallel} tensor parallel ranks or pipeline "
                        f"stages, and {self.key} has the part of one: load the files of the model by their own paths"
                    )
                )
            elif 0 not in part.tensor.shape:
                entries[name] = part
            elif name in frozen:
                entries[name] = frozen[name]
            elif name not in shared:
                entries[name] = Refused(
                    UnsupportedLeafError(
                        f"it is a parameter that ZeRO 3 divided, and {self.key} has no shape of it: save with "
                        "exclude_frozen_parameters=False"
                    )
                )
        for name, entry in (*frozen.items(), *weights.items()):
            entries.setdefault(name, entry)
        entries.update(
            {name: entries[other] for name, other in shared.items() if isinstance(other, str) and other in entries}
        )
        return entries


def named_groups(groups: Sequence[Part], names: Sequence[Sequence[str]]) -> Entry:
    """Return the groups of an optimizer with the names of their parameters.

    Args:
        groups: the groups of each process, whose ``params`` are flat tensors. If their number does not match `names`,
            the groups are returned without names. Options that differ between the processes are leaves that cannot be
            loaded.
        names: for each flat tensor, the names of its parameters.
    """
    by_rank = [[group.children() for group in part.children().values()] for part in groups]
    counts = [len(_items(group.get("params"))) for group in by_rank[0]]
    if sum(counts) != len(names) or any(len(each) != len(counts) for each in by_rank):
        return merge_parts(groups)
    left = iter(names)
    result: list[Entry] = []
    for count, *options in zip(counts, *by_rank, strict=True):
        merged = _merged(options, ("params",))
        result.append(
            {**options[0], **merged, "params": [*itertools.chain.from_iterable(itertools.islice(left, count))]}
        )
    return result


def _items(part: Part | None) -> Sequence[object]:
    mapping = None if part is None else part.plain()
    return mapping if isinstance(mapping, tuple | list) else ()


class Zero:
    """The partitions of all processes, from their optimizer files.

    Attributes:
        stage: 3, or 2 for both ZeRO 1 and 2.
        processes: number of data parallel processes.
        sizes: for each process, the number of weight elements in each group.
    """

    def __init__(self, weights: Weights, files: Sequence[str], states: Sequence[dict[str, Part]]) -> None:
        self._weights = weights
        self._files = files
        self._states = states
        self._first = states[0]
        self.processes = len(files)
        self.stage = 3 if _FLAT_3 in self._first else 2
        key = _FLAT_3 if self.stage == 3 else _FLAT_12
        self._flat = [self._groups(rank, key) for rank in range(self.processes)]
        self.sizes = [[math.prod(_tensor(part).shape) for part in groups] for groups in self._flat]
        self._positions = self._place()

    @classmethod
    def of(cls, reader: PartReader, files: Sequence[str], weights: Weights) -> Zero:
        """Read the optimizer files, in the order of the ranks.

        Raises:
            CorruptCheckpointError: a file has no partitions, or the partitions do not match the parameters.
        """
        states: list[dict[str, Part]] = []
        for key in files:
            part = named(reader.read(key)).get("optimizer_state_dict")
            named_parts = {} if part is None else named(part)
            if _FLAT_3 not in named_parts and _FLAT_12 not in named_parts:
                raise CorruptCheckpointError(
                    f"{key} has no partitions of weights in fp32: {RESTORE}, or load one file by its own path", key=key
                )
            states.append(named_parts)
        counts = states[0]["partition_count"].plain() if "partition_count" in states[0] else None
        count = max(
            [each for each in (counts if isinstance(counts, tuple) else (counts,)) if type(each) is int], default=0
        )
        if count not in (0, len(files)):
            raise CorruptCheckpointError(
                f"{files[0]} is one of {count} partitions, but {len(files)} ranks have a file: remove the files of "
                "another save, restore the missing ones from a copy, or load another checkpoint",
                key=files[0],
            )
        return cls(weights, files, states)

    def _groups(self, rank: int, key: str) -> Sequence[Part]:
        part = self._states[rank].get(key)
        groups = [] if part is None else [*part.children().values()]
        if not groups or any(group.tensor is None for group in groups):
            raise CorruptCheckpointError(
                f"{self._files[rank]} has no list of tensors as {key!r}: {RESTORE}", key=self._files[rank]
            )
        return groups

    def _place(self) -> Mapping[str, tuple[int, int]]:
        """Return the group of each parameter, and the position of its first element in the flat vector.

        With ZeRO 3, the groups of a process form one vector, and the returned group is that of the first element.

        Raises:
            CorruptCheckpointError: the parameters have more elements than the partitions, or far fewer.
        """
        sizes = self.sizes
        if len({len(each) for each in sizes}) != 1:
            raise CorruptCheckpointError(f"{self._weights.key}: the ranks have different numbers of groups; {RESTORE}")
        places: dict[str, tuple[int, int]] = {}
        if self.stage == 3:
            bounds = [0, *itertools.accumulate(sizes[0])]
            position = 0
            for name, shape in self._weights.shapes.items():
                places[name] = max(bisect.bisect_right(bounds, position) - 1, 0), position
                position += -(-math.prod(shape) // self.processes)
            for rank, each in enumerate(sizes):
                self._expect(position == sum(each), sum(each), position, f"the partitions of rank {rank}")
            return places
        self._expect(
            len(self._weights.groups) == len(sizes[0]), len(sizes[0]), len(self._weights.groups), "the number of groups"
        )
        for number, group in enumerate(self._weights.groups):
            paddings = self._alignment(number, len(group))
            position = 0
            for (name, shape), padding in zip(group.items(), paddings, strict=True):
                places[name] = number, position
                position += math.prod(shape) + padding
            # DeepSpeed pads a group to a multiple of twice the number of processes, and later removes a part of the
            # padding (zero_to_fp32.py).
            align = 2 * self.processes
            available = sum([each[number] for each in sizes])
            self._expect(-(-position // align) == -(-available // align), available, position, f"group {number}")
        return places

    def _alignment(self, group: int, count: int) -> Sequence[int]:
        stated = self._first["param_alignment_paddings"].plain() if "param_alignment_paddings" in self._first else None
        if stated is None:
            return [0] * count
        paddings = stated[group] if isinstance(stated, tuple) and group < len(stated) else None
        if (
            not isinstance(paddings, tuple | list)
            or len(paddings) != count
            or not all(type(padding) is int and 0 <= padding < 1 << 62 for padding in paddings)
        ):
            raise CorruptCheckpointError(
                f"{self._files[0]} has no valid paddings for the {count} parameters of group {group}: {RESTORE}",
                key=self._files[0],
            )
        return paddings

    def _expect(self, condition: bool, count: int, expected: int, what: str) -> None:
        if not condition:
            raise CorruptCheckpointError(
                f"{what}: the files of the optimizer have {count}, and {self._weights.key} describes {expected}; a "
                f"file is from another checkpoint or damaged: {RESTORE}",
                key=self._weights.key,
            )

    def weights(self) -> Mapping[str, Entry]:
        """Return the weights in fp32 by name."""
        return self._arrays(self._flat, "module/{}")

    def states(self) -> Mapping[Key, Entry]:
        """Return the states of the optimizer by the name of the parameter."""
        by_rank = [self._states_of(rank) for rank in range(self.processes)]
        states_by_name: dict[Key, dict[Key, Entry]] = {
            name: {} for name, (group, _) in self._positions.items() if any(states[group] for states in by_rank)
        }
        kinds = dict.fromkeys([kind for states in by_rank for state in states for kind in state])
        for kind in kinds:
            in_groups = [[state.get(kind) for state in states] for states in by_rank]
            if all(self._is_partition(parts, group) for group, parts in enumerate(zip(*in_groups, strict=True))):
                template = f"optimizer/state/{{}}/{kind}"
                for name, entry in self._arrays(in_groups, template).items():
                    states_by_name[name][kind] = entry
                continue
            for name, (group, _) in self._positions.items():
                if held := [part for parts in in_groups if (part := parts[group]) is not None]:
                    states_by_name[name][kind] = self._of_group(held, kind)
        return dict(states_by_name)

    def _is_partition(self, parts: Sequence[Part | None], group: int) -> bool:
        """Return True if a state of a group has one value per weight element, or if no process has the state.

        Checks only the first process that has the state.
        """
        for rank, part in enumerate(parts):
            if part is not None:
                extents = _tensor(self._flat[rank][group]).shape
                return part.tensor is not None and len(part.tensor.shape) == 1 and part.tensor.shape >= extents
        return True

    def _of_group(self, parts: Sequence[Part], kind: str) -> Entry:
        tensor = parts[0].tensor
        if tensor is None or not tensor.shape:
            return merge_parts(parts)  # a number, such as the step, applies to every parameter of the group
        return Refused(
            UnsupportedLeafError(
                f"it is in the state {kind!r} of a whole partition, {tensor.spec}, which is not divided as the weights "
                "are: load it with DeepSpeed"
            )
        )

    def _states_of(self, rank: int) -> Sequence[Mapping[str, Part]]:
        """Return the states of each group of a process."""
        count = len(self._flat[0])
        key = _STATE_3 if self.stage == 3 else _STATE_12
        state = self._states[rank].get(key)
        if state is None:
            return [{}] * count
        children = state.children()
        if "state" not in children:  # a list with the states of each group (elastic checkpoints)
            self._expect(
                len(children) in (0, count), len(children), count, f"the states in {self._files[rank]} of all groups"
            )
            return [named(part) for part in children.values()] or [{}] * count
        states = children["state"].children()
        return [named(states[number]) if number in states else {} for number in self._numbers(rank)]

    def _numbers(self, rank: int) -> Sequence[int]:
        """Return the number of each flat tensor in the state of the optimizer."""
        count = len(self._flat[0])
        key = _STATE_3 if self.stage == 3 else _STATE_12
        groups = self._states[rank][key].children().get("param_groups")
        numbers: list[int] = []
        for group in [] if groups is None else groups.children().values():
            numbers.extend([number for number in _items(named(group).get("params")) if isinstance(number, int)])
        return numbers if len(numbers) == count else range(count)

    def rest(self) -> Mapping[Key, Entry]:
        """Return the state of the optimizer besides its partitions, such as the scale of the loss."""
        states: list[dict[Key, Part]] = [
            {key: part for key, part in state.items()}  # noqa: C416  # keys of a wider type
            for state in self._states
        ]
        return _merged(states, PARTITIONS)

    def param_groups(self) -> Entry:
        """Return the groups of the optimizer, with the names of their parameters."""
        key = _STATE_3 if self.stage == 3 else _STATE_12
        optimizer_states = [state[key].children() for state in self._states if key in state]
        groups = [each["param_groups"] for each in optimizer_states if "param_groups" in each]
        names: list[list[str]] = [[] for _ in self._flat[0]]
        for name, (group, _) in self._positions.items():
            names[min(group, len(names) - 1)].append(name)
        return named_groups(groups, names) if groups else []

    def _arrays(self, groups: Sequence[Sequence[Part | None]], template: str) -> dict[str, Entry]:
        """Return an array for each parameter.

        Args:
            groups: for each process, a flat tensor for each group, or None.
            template: path of an array, with ``{}`` in place of the parameter name.
        """
        vectors = _Vectors(self, groups)
        arrays: dict[str, Entry] = {}
        for name, shape in self._weights.shapes.items():
            group, position = self._positions[name]
            if all(parts[group] is None for parts in groups):
                continue
            path = template.format(name)
            arrays[name] = guarded(lambda: vectors.array(group, position, shape, path))  # noqa: B023
        return arrays


def _tensor(part: Part) -> StoredTensor:
    assert part.tensor is not None  # `_groups` refuses others
    return part.tensor


class _Vectors:
    """The flat vectors of the weights, or of one kind of optimizer state."""

    def __init__(self, zero: Zero, groups: Sequence[Sequence[Part | None]]) -> None:
        self._stage = zero.stage
        self._sizes = zero.sizes
        self._groups = groups
        self._made: dict[int, Sequence[Vector] | CheckpointError] = {}

    def array(self, group: int, position: int, shape: tuple[int, ...], path: str) -> Divided:
        """Return an array that begins at a position of a vector.

        Raises:
            CorruptCheckpointError, UnsupportedLeafError: the vectors are not complete.
        """
        vectors = self._vectors(0 if self._stage == 3 else group, path)
        if self._stage == 3:
            return in_vectors(vectors, position, shape, path)
        (vector,) = vectors
        size = math.prod(shape)
        if position + size > vector.starts[-1]:
            raise CorruptCheckpointError(
                f"{path} {list(shape)} needs the elements {position} to {position + size} of group {group}, which has "
                f"{vector.starts[-1]}: {RESTORE}"
            )
        return vector.array(shape, list(vector.pieces(position, shape, 0, size)))

    def _vectors(self, group: int, path: str) -> Sequence[Vector]:
        """Return one vector per process with ZeRO 3, else a single vector over all processes."""
        made = self._made.get(group)
        if made is None:
            try:
                if self._stage == 3:
                    runs = [[stored_run(part, path) for part in parts] for parts in self._groups]
                    self._expect(runs, self._sizes, path)
                    made = [Vector(each, path) for each in runs]
                else:
                    # Do not check the size of the last process that has elements, because its states may have padding
                    # that its weights lack.
                    row = [stored_run(parts[group], path) for parts in self._groups]
                    sizes = [each[group] for each in self._sizes]
                    last = max([rank for rank, size in enumerate(sizes) if size], default=0)
                    self._expect([row[:last]], [sizes[:last]], path)
                    made = [Vector(row, path)]
            except (CorruptCheckpointError, UnsupportedLeafError) as error:
                made = error
            self._made[group] = made
        if isinstance(made, CheckpointError):
            raise made
        return made

    def _expect(self, runs: Sequence[Sequence[Run]], sizes: Sequence[Sequence[int]], path: str) -> None:
        """Raise an error if an optimizer state is not partitioned like the weights."""
        for each, expected in zip(runs, sizes, strict=True):
            for run, size in zip(each, expected, strict=True):
                if run.size != size:
                    raise CorruptCheckpointError(
                        f"{path} is in a partition of {run.size} elements in {run.storage.key}, and the partition of "
                        f"the weights has {size}: {RESTORE}",
                        key=run.storage.key,
                    )
