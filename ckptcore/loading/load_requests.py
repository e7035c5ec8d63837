"""Requests of a load, and the targets that it fills."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ckptcore.errors import TreeMismatchError
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.matching_options import EXACT, Matching
from ckptcore.model.arrays import StridedMemory
from ckptcore.model.metadata import LeafRecord, ValueRecord
from ckptcore.model.tree import format_path
from ckptcore.protocols import Transforms
from ckptcore.tree.flattening import Shape, shared_containers

if TYPE_CHECKING:
    from ckptcore.loading.matching_options import LoadReport
    from ckptcore.select import Selection

__all__ = [
    "AS_IT_IS",
    "LoadAs",
    "LoadRequest",
    "check_shared_containers",
    "check_shared_memory",
]


def check_shared_memory(
    opened: Checkpoint, numbers: Sequence[int | None], memory: Sequence[Sequence[StridedMemory] | None]
) -> None:
    """Refuse leaves of a target that share memory, unless they are one array in the target and in the checkpoint.

    Args:
        opened: the checkpoint.
        numbers: by leaf of the target, the stored leaf that fills it.
        memory: by leaf of the target, what is filled.

    Raises:
        TreeMismatchError: names both leaves.
    """
    tree = opened.tree
    spaces: dict[Hashable, list[tuple[range, int, StridedMemory]]] = {}
    for number, parts in zip(numbers, memory, strict=True):
        for part in parts or ():
            assert number is not None  # only a leaf that is loaded has memory to fill
            if part.overlaps_itself():
                raise _refusal(opened, number, number, "elements that share memory")
            if extent := part.extent:
                spaces.setdefault(part.space, []).append((extent, number, part))
    for filled in spaces.values():
        filled.sort(key=lambda one: one[0].start)
        before: list[tuple[range, int, StridedMemory]] = []
        for extent, number, part in filled:
            before = [one for one in before if one[0].stop > extent.start]
            for _, other, others in before:
                if number == other and part.shares_bytes(others):
                    raise _refusal(opened, number, number, "elements that share memory")
                if part == others:
                    if tree.aliases.get(number, number) != tree.aliases.get(other, other):
                        raise _refusal(opened, other, number, "one array")
                elif part.shares_bytes(others):
                    raise _refusal(opened, other, number, "arrays that overlap")
            before.append((extent, number, part))


def check_shared_containers(opened: Checkpoint, numbers: Sequence[int | None], shape: Shape) -> None:
    """Refuse a container at two places of a target for which the checkpoint has two values.

    Raises:
        TreeMismatchError: names a leaf of both.
    """
    for first, second in shared_containers(shape):
        for one, other in zip(first, second, strict=True):
            number, others = numbers[one], numbers[other]
            if number is not None and others is not None and _stored(opened, number) != _stored(opened, others):
                raise _refusal(opened, number, others, "one object")


def _stored(opened: Checkpoint, number: int) -> LeafRecord | int:
    """Return the value of a stored leaf, or the number of its array."""
    record = opened.tree.leaves[number]
    return record if isinstance(record, ValueRecord) else opened.tree.aliases.get(number, number)


def _refusal(opened: Checkpoint, first: int, second: int, shared: str) -> TreeMismatchError:
    one, other = (format_path(opened.tree.paths[number]) for number in (first, second))
    if first == second:
        reason, line = f"{one} has {shared} in the target", f"{one}: has {shared} in the target"
    else:
        reason = f"{one} and {other} are {shared} in the target and two in {opened.location.display}"
        line = f"{other}: {shared} with {one} in the target, not in the checkpoint"
    return TreeMismatchError(
        f"{reason}: they cannot both be filled. Use load(), or a target without shared memory. Nothing was changed",
        [line],
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """How a checkpoint is loaded. Behind the API it is handed from the call inwards as one thing.

    Attributes:
        select: which stored leaves are loaded; None: all.
        transforms: what is changed of the stored tree before it is matched.
        matching: which differences between what is asked for and what is stored are allowed.
        report: is told what the load did, when it is done; None: nobody asks.
    """

    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None

    def __post_init__(self) -> None:
        """Refuse what is no option; what is selected and transformed is looked at where it is used.

        Raises:
            TypeError: names the option and what it may be.
        """
        if not isinstance(self.matching, Matching):
            raise TypeError(f'matching={self.matching!r}: expected a ckptcore.Matching, such as Matching(cast="safe")')
        if self.report is not None:
            from ckptcore.loading.matching_options import LoadReport  # who asks for a report waits for it anyway

            if not isinstance(self.report, LoadReport):
                raise TypeError(f"report={self.report!r}: expected a ckptcore.LoadReport, which the load fills")


AS_IT_IS: Final = LoadRequest()
"""A load of all there is, exactly as it is asked for."""


@dataclass(frozen=True, slots=True)
class LoadAs(Generic[T]):
    """Says how one of several checkpointables is loaded: what `ckptcore.load` takes besides its location, under the name of this one.

    Attributes:
        like: what it is loaded like or into, as it would stand without the wrapper; None: as it was saved.
        select, transforms, matching, report: as for `ckptcore.load`, or for `ckptcore.load_into` where an object is restored in place. For
            trees only, not for the files of objects.
    """

    like: T
    _: KW_ONLY
    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None

    @property
    def request(self) -> LoadRequest:
        """The options, without what it is loaded like."""
        return LoadRequest(select=self.select, transforms=self.transforms, matching=self.matching, report=self.report)
