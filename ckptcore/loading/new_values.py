"""NewValue: a load target that builds a new value with the structure of an abstract tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptcore.context import Context
from ckptcore.errors import TreeMismatchError
from ckptcore.loading.abstract_trees import stored_in, with_stored_values
from ckptcore.loading.load import Load, LoadRequest, LoadTarget, files_instead
from ckptcore.loading.reading import TreeRead
from ckptcore.matching.leaf_matching import match_leaves
from ckptcore.matching.options import Matched
from ckptcore.model.metadata import LeafRecord, ValueRecord
from ckptcore.model.tree import Node, TreePath, format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import Flat, flatten, per_process_values, requested_columns
from ckptcore.tree.shapes import Shape, shared_containers, unflatten


class NewValue(LoadTarget[object]):
    """A load target that builds a new value with the structure of an abstract tree."""

    def __init__(self, abstract: object) -> None:
        self._abstract = abstract
        self._shape: Shape | None = None
        self._same: Mapping[int, int] = {}

    def match(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Find the stored leaf for each abstract leaf."""
        with load.recording.phase("open"):
            flat = flatten_like(checkpoint, self._abstract, load.context, load.request)
            self._shape = flat.shape
            matched = match_value(checkpoint, flat, load.context, load.request)
            shared = shared_containers(flat.shape, lambda node: node.handler.keeps_identity(node.like))
            check_shared_containers(checkpoint, matched.numbers, shared, _two_values)
            self._same = _loaded_elsewhere(matched.numbers, shared)
            return matched

    def build(self, load: Load[object], reading: TreeRead) -> object:
        """Put the leaves into containers like those of the abstract tree."""
        for position, loaded in self._same.items():
            reading.leaves[position] = reading.leaves[loaded]
        return unflatten(self._shape, reading.leaves)


def flatten_like(checkpoint: Checkpoint, value: object, context: Context, request: LoadRequest) -> Flat:
    """Flatten an abstract tree or a target. Handlers of objects in it can look up their stored abstract trees.

    Plain values take their stored structure, unless the request has ``Matching(values="error")`` or a selection.

    Raises:
        TreeMismatchError: files are stored, or another number of processes saved a `PerProcess` value.
    """
    if checkpoint.is_files:
        raise files_instead(checkpoint)
    runtime = runtime_of(context)
    registry, job = runtime.registry, runtime.job()
    find = stored_in(checkpoint.tree, _chosen_leaves(checkpoint, context, request), registry)
    columns = requested_columns(checkpoint.tree)
    flat = flatten(value, registry, rank=job.rank, placeholders=True, stored_at=find, columns=columns)
    for path in per_process_values(flat.shape):
        _expect_processes(checkpoint, path, job.size)
    if request.matching.values == "error" or request.select is not None:
        return flat
    by_name = _is_by_name(checkpoint, request)
    return with_stored_values(flat, checkpoint.tree, registry, by_name=by_name)


def _chosen_leaves(checkpoint: Checkpoint, context: Context, request: LoadRequest) -> frozenset[int] | None:
    """Return the numbers of the leaves that a request selects; None for all leaves."""
    if request.select is None:
        return None
    from ckptcore.loading.selections import chosen_leaves  # only selections need it

    return chosen_leaves(checkpoint, request.select, context)


def _is_by_name(checkpoint: Checkpoint, request: LoadRequest) -> bool:
    """Return True if leaves are matched by the texts of their keys."""
    return checkpoint.root is None or request.matching.keys == "text"


def _expect_processes(checkpoint: Checkpoint, path: TreePath, size: int) -> None:
    """Check that as many processes saved a `PerProcess` value as this job has. All ranks get the same result.

    Raises:
        TreeMismatchError: another number of processes saved it.
    """
    node = checkpoint.tree.skeleton
    for key in path:
        if not isinstance(node, Node) or key not in node.keys:
            return  # `match_leaves` reports this difference
        node = node.children[node.keys.index(key)]
    ranks = [key for key in node.keys if isinstance(key, int)] if isinstance(node, Node) else []
    if ranks and sorted(ranks) != list(range(size)):
        name = format_path(path)
        raise TreeMismatchError(
            f"{name} in {checkpoint.location.display} has a separate value for each of {max(ranks) + 1} processes, but "
            f"this job has {size}. Request the values that this process needs as a dict by rank, such as "
            f"{{{ranks[0]}: ...}}, instead of PerProcess(...)",
            [f"{name}: {max(ranks) + 1} processes saved it, {size} load it"],
        )


def match_value(
    checkpoint: Checkpoint, flat: Flat, context: Context, request: LoadRequest, *, in_place: bool = False
) -> Matched:
    """Find the stored leaf for each leaf of an abstract tree."""
    job = runtime_of(context).job()
    return match_leaves(
        flat,
        checkpoint.tree,
        checkpoint.location.display,
        by_name=_is_by_name(checkpoint, request),
        matching=request.matching,
        rank_and_size=(job.rank, job.size),
        chosen=_chosen_leaves(checkpoint, context, request),
        in_place=in_place,
    )


def check_shared_containers(
    checkpoint: Checkpoint,
    numbers: Sequence[int | None],
    shared: Sequence[tuple[range, range]],
    refusal: Callable[[Checkpoint, int, int], TreeMismatchError],
) -> None:
    """Refuse a container that occurs several times in a target or request, if the checkpoint has two values for it.

    Args:
        checkpoint: the checkpoint.
        numbers: by leaf, the number of the stored leaf, or None.
        shared: pairs of occurrences, as ranges of leaves. See `ckptcore.tree.shapes.shared_containers`.
        refusal: returns the error for the numbers of two stored leaves.

    Raises:
        TreeMismatchError: names a leaf of each occurrence.
    """
    for first, second in shared:
        for leaf, twin in zip(first, second, strict=True):
            number, other = numbers[leaf], numbers[twin]
            if number is not None and other is not None and _stored(checkpoint, number) != _stored(checkpoint, other):
                raise refusal(checkpoint, number, other)


def _loaded_elsewhere(numbers: Sequence[int | None], shared: Sequence[tuple[range, range]]) -> Mapping[int, int]:
    """Return the leaves that are copied instead of loaded, each with the loaded leaf.

    If a shared container occurs twice, a leaf may be loaded in only one occurrence. The other occurrence gets a copy.
    """
    return {
        leaf: twin
        for pair in shared
        for places in zip(*pair, strict=True)
        for leaf, twin in (places, places[::-1])
        if numbers[leaf] is None and numbers[twin] is not None
    }


def _stored(checkpoint: Checkpoint, number: int) -> LeafRecord | int:
    """Return the value of a stored leaf, or the number of its array."""
    record = checkpoint.tree.leaves[number]
    return record if isinstance(record, ValueRecord) else checkpoint.tree.aliases.get(number, number)


def _two_values(checkpoint: Checkpoint, first: int, second: int) -> TreeMismatchError:
    name, other = (format_path(checkpoint.tree.paths[number]) for number in (first, second))
    return TreeMismatchError(
        f"{name} and {other} are one object in the request, but separate in {checkpoint.location.display}: the object "
        "cannot have both values. Request two objects, or PLACEHOLDER in one of the two places",
        [f"{other}: one object with {name} in the request, not in the checkpoint"],
    )
