"""Partial saves. Each part is a session of ckptcore, and `finalize` commits all parts.

Partial saves that Orbax began are continued and finalized by Orbax.
"""

from __future__ import annotations

import json
from typing import Any

import jax

import ckptcore
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from ckptcore.training import expanded_location
from ckptcore_integrations.orbax_v1.library import (
    STATE_CHECKPOINTABLE_KEY,
    PartialSaveReplacementError,
    add_partial_save_suffix,
    get_context,
    is_partial_save_path,
    remove_partial_save_suffix,
    v1,
)
from ckptcore_integrations.orbax_v1.saving import Response, prepare
from ckptcore_integrations.orbax_v1.settings import context_of, layout_of
from ckptcore_integrations.orbax_v1.trees import TREE_HANDLER


def save(path: Any, state: Any, *, custom_metadata: Any = None) -> None:
    """Save a part of a tree. See `orbax.checkpoint.v1.partial.save`."""
    save_async(path, state, custom_metadata=custom_metadata).result()


def save_async(path: Any, state: Any, *, custom_metadata: Any = None) -> v1.AsyncResponse[None]:
    """Begin to save a part of a tree. See `orbax.checkpoint.v1.partial.save_async`.

    Raises:
        FileExistsError: the checkpoint is final.
        PartialSaveReplacementError: an earlier part has one of the leaves.
        NotImplementedError: an option of the Context cannot be honoured.
    """
    path = expanded_location(path)
    final = get_context().file.path_class(path)
    if final.exists():
        raise FileExistsError(f"Finalized checkpoint already exists at {final}.")
    if add_partial_save_suffix(final).is_dir():
        return v1.partial.save_async(path, state, custom_metadata=custom_metadata)
    arguments = prepare(final, {STATE_CHECKPOINTABLE_KEY: state}, False, custom_metadata)
    if arguments["layout"].rules:
        raise NotImplementedError(
            "array.saving.scoped_storage_options_creator: all parts of a partial save share one chunk size. Set "
            "array.saving.storage_options.chunk_byte_size instead"
        )
    added = [jax.tree_util.keystr(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(state)]
    record = _Record(final)
    if known := sorted({*added}.intersection(record.leaves)):
        raise _replacement(f"An earlier part has {', '.join(known)}: leave it out of this part")
    try:
        handle = _session(final).save_async(arguments["checkpointables"][STATE_CHECKPOINTABLE_KEY])
    except TreeMismatchError as error:
        raise _replacement(str(error)) from error

    handle.wait_for_claim()  # Orbax, too, creates the directory of a partial save before it returns

    def finish() -> None:
        handle.result()
        if jax.process_index() == 0:
            record.add(added, custom_metadata)

    return Response(finish)


def finalize(path: Any) -> None:
    """Commit all parts as one checkpoint. See `orbax.checkpoint.v1.partial.finalize`.

    Raises:
        FileExistsError: the checkpoint is final.
        FileNotFoundError: there are no parts.
    """
    path = expanded_location(path)
    final = get_context().file.path_class(path)
    if is_partial_save_path(final):
        final = remove_partial_save_suffix(final)
    if final.exists():
        raise FileExistsError(f"Finalized checkpoint already exists at {final}.")
    if add_partial_save_suffix(final).is_dir():
        v1.partial.finalize(path)
        return
    record = _Record(final)
    _session(final).finalize(metadata=record.custom_metadata)
    if jax.process_index() == 0:
        record.remove()


def _session(location: Any) -> Any:
    context = get_context()
    layout = layout_of(context, {}, {STATE_CHECKPOINTABLE_KEY: TREE_HANDLER}, item=STATE_CHECKPOINTABLE_KEY)
    return ckptcore.partial(str(location), layout=layout, context=context_of(context))


def _replacement(reason: str) -> PartialSaveReplacementError:
    return PartialSaveReplacementError(f"Partial saving currently does not support REPLACEMENT. {reason}")


class _Record:
    """A file with facts that sessions of ckptcore do not store. Its path is the one where Orbax would store parts.

    Attributes:
        leaves: key paths of the leaves of all parts.
        custom_metadata: the metadata of all parts; a later part overrides an earlier one.
    """

    def __init__(self, final: Any) -> None:
        """Read the file. If there are no parts, the file is from an earlier checkpoint, and is ignored."""
        self._file = add_partial_save_suffix(final)
        self.leaves: list[str] = []
        self.custom_metadata: dict[str, Any] = {}
        if _has_parts(final) and self._file.is_file():
            self.leaves, self.custom_metadata = _read_facts(self._file)

    def add(self, leaves: list[str], custom_metadata: Any) -> None:
        """Add a part, atomically."""
        self.leaves = [*self.leaves, *leaves]
        self.custom_metadata = {**self.custom_metadata, **(custom_metadata or {})}
        temporary = self._file.parent / f".{self._file.name}.tmp"
        temporary.write_text(json.dumps({"leaves": self.leaves, "custom_metadata": self.custom_metadata}))
        temporary.replace(self._file)

    def remove(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)


def _read_facts(file: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the leaves and the metadata in a file, which may be damaged."""
    try:
        facts = json.loads(file.read_bytes())
        if isinstance(facts["leaves"], list) and isinstance(facts["custom_metadata"], dict):
            return facts["leaves"], facts["custom_metadata"]
        reason = "it has values of other types"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = repr(error)
    raise CorruptCheckpointError(
        f"{file} is damaged: {reason}. It has the custom_metadata of the parts, not their arrays. Delete it, and pass "
        "custom_metadata again with another part",
        key=file.name,
    )


def _has_parts(location: Any) -> bool:
    try:
        ckptcore.metadata(str(location))
    except UncommittedCheckpointError:
        return True
    except CheckpointNotFoundError:
        return False
    return False
