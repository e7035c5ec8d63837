"""Saves to one safetensors file: a flat dict of arrays of one process, in the format that other libraries write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, cast

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.builtin.safetensors_files import DTYPES
from ckptcore.commit.location import AnyLocation, Location, refuse_file_name
from ckptcore.commit.single_file import FileTransaction, file_exists
from ckptcore.commit.stored_root import OVERWRITES, unknown_overwrite
from ckptcore.errors import CheckpointExistsError, InvalidLocationError
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, TreeMetadata
from ckptcore.model.tree import format_path
from ckptcore.planning import check_coverage
from ckptcore.protocols import SaveCommit, StorageBackend
from ckptcore.records import dataclass
from ckptcore.saving.descriptions import PartDescription, TreeDescription
from ckptcore.saving.requests import NOTHING_COMMITTED, OneTree, Save, SaveDraft, SaveRequest, failing_before_claim
from ckptcore.saving.writing import PlainSave

_NO_LIMIT: Final = 1 << 62
_SHOWN: Final = 3


def file_request(request: SaveRequest) -> SaveRequest:
    """Return the request of a save to one file.

    Raises:
        InvalidLocationError: one file cannot store the request.
    """
    location, layout = request.destination.location, request.layout
    if (overwrite := request.destination.overwrite) not in OVERWRITES:
        raise unknown_overwrite(overwrite)
    if not isinstance(request.values, OneTree):
        raise refuse_file_name(location, "one file cannot have several checkpointables")
    if type(request.strategy) is not PlainSave:
        raise refuse_file_name(location, f"one file cannot be saved with strategy={request.strategy!r}")
    if layout == "safetensors":
        layout = SafetensorsLayout()
    if not isinstance(layout, SafetensorsLayout):
        shown = layout if isinstance(layout, str) else layout.name
        raise refuse_file_name(location, f"the layout {shown!r} writes a directory")
    custom = dict(request.notes.custom or {})
    if not all(isinstance(text, str) for item in custom.items() for text in item):
        raise refuse_file_name(location, "the metadata of a .safetensors file has only text, and metadata= has more")
    own = cast(Mapping[str, str], {**layout.metadata, **custom})
    try:
        layout = replace(layout, metadata=own, standalone=True, max_file_bytes=_NO_LIMIT)
    except ValueError as error:
        raise InvalidLocationError(f"cannot save to {location}: {error}. Nothing was written") from error
    return request._replace(
        layout=layout,
        strategy=_SaveFile(location),
        notes=request.notes._replace(custom=None),
    )


@dataclass(frozen=True, slots=True)
class _SaveFile(PlainSave):
    """Write one file, and commit it without a root.

    Attributes:
        location: the location, as the user gave it.
    """

    checks_target: ClassVar[bool] = True

    location: AnyLocation

    def prepare(self, draft: SaveDraft) -> Save:
        """Refuse values that one file cannot store, and plan the file."""
        with failing_before_claim(draft.save.agreement):
            self._refuse(draft)
            return draft.plan(self)

    def _refuse(self, draft: SaveDraft) -> None:
        """Refuse a state that a load of the file would return changed, and a location that may not be replaced."""
        size, target = draft.save.agreement.size, draft.save.target
        if size > 1:
            raise refuse_file_name(self.location, f"{size} processes save together, and one process writes a file")
        if problem := _problem(draft.descriptions):
            raise refuse_file_name(self.location, f"a .safetensors file is a flat dict of arrays, and {problem}")
        _refuse_target(target.location, replaces=bool(target.overwrite))

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of a save."""
        if save.has_other_writers:
            raise refuse_file_name(self.location, "several processes hold the arrays, and one writes a file")
        return _FileCommit(save)


def _refuse_target(location: Location, *, replaces: bool) -> None:
    if location.is_object:
        if not replaces:
            raise file_exists(location)
    elif location.store.list_names():
        raise CheckpointExistsError(
            f"{location.display} is a directory, and a file does not replace it: delete it with ckptcore.delete, or "
            "save elsewhere. Nothing was changed"
        )
    # An empty directory lists no names, so look for it in the listing of its parent.
    elif location.commit_method.replaces_atomically and f"{location.name}/" in location.parent.list_names():
        raise CheckpointExistsError(
            f"{location.display} is an empty directory, and a file does not replace it: remove it, or save elsewhere. "
            "Nothing was changed"
        )


def _problem(descriptions: Sequence[PartDescription]) -> str:
    """Return the reason why one file cannot store a value unchanged; empty if it can."""
    (description,) = descriptions
    if not isinstance(description, TreeDescription):
        return "the object writes its own files"
    tree = description.tree
    nested = [path for path in tree.paths if len(path) != 1 or not isinstance(path[0], str)]
    if nested or getattr(tree.skeleton, "kind", None) not in ("dict", "OrderedDict"):
        return f"{format_path(nested[0]) if nested else 'the state'} is not an entry of a flat dict with text as keys"
    others = [_reason(tree, leaf) for leaf in range(len(tree.leaves))]
    reasons = [f"{format_path(path)} is {reason}" for path, reason in zip(tree.paths, others, strict=True) if reason]
    return "; ".join(reasons[:_SHOWN]) + (f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else "")


def _reason(tree: TreeMetadata, leaf: int) -> str:
    record = tree.leaves[leaf]
    if not isinstance(record, ArrayRecord):
        return "no array"
    if str(tree.paths[leaf][0]) in ("__metadata__", ""):
        return "an entry that safetensors reserves"
    if record.kind != PLAIN_ARRAY and not record.kind.endswith("tensor"):
        return f"a {record.kind}" + (" (numpy.asarray makes an array of it)" if record.kind == "numpy.scalar" else "")
    return "" if record.spec.dtype in DTYPES else f"of dtype {record.spec.dtype}, which safetensors lacks"


class _FileCommit:
    """The commit of one file."""

    meaning = NOTHING_COMMITTED
    commit_meaning = ""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._file: FileTransaction | None = None

    def claim(self) -> None:
        target = self._save.target
        with self._save.recording.phase("claim"):
            _refuse_target(target.location, replaces=bool(target.overwrite))
            self._file = target.location.commit_method.begin_file(
                target.location, self._save.info.claimed, replaces=bool(target.overwrite)
            )

    @property
    def store(self) -> StorageBackend:
        assert self._file is not None, "the location is claimed first"
        return self._file.store

    def commit(self, payloads: Sequence[object]) -> None:
        assert self._file is not None, "the location is claimed first"
        (part,) = self._save.parts
        check_coverage(part.plan.tree, part.receipts)
        layout = cast(SafetensorsLayout, part.layout)
        with self._save.recording.phase("commit"):
            if self._save.target.before_commit is not None:
                self._save.target.before_commit()
            self._file.commit(*layout.file_names(part.plan.tree))

    def settle(self, error: Exception | None) -> None:
        if error is not None:
            raise error  # no other process took part

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()
