"""Near directories of single hosts: which processes share one, and which steps are on all hosts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptcore.commit.location import Location, Place, Within, resolve_location
from ckptcore.commit.root import Claimed, PartialSave, Root, new_save_id
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import ADMINISTRATION, read_root, root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    NotSharedError,
    UnsupportedVersionError,
)
from ckptcore.job.agreement import Agreement
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import JSON
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.host_groups import HOST_PROBES, Hosts

__all__ = ["HostSteps", "agreed_steps", "find_hosts", "is_whole_here"]

logger = logging.getLogger("ckptcore.tiers")


def find_hosts(agreement: Agreement, store: StorageBackend) -> Hosts:
    """Find out which processes see the same directory: each writes an object and lists those of others. On every rank.

    Args:
        agreement: with the other processes.
        store: the storage, opened at the directory of this process.

    Raises:
        NotSharedError: if one process sees what another one put, and that does not see the same.
    """
    if agreement.size == 1:
        return Hosts(((0,),))
    token = agreement.lead("token", lambda: secrets.token_hex(8))
    key = f"{HOST_PROBES}{token}.{agreement.rank}"
    try:
        with agreement.stage("put"):
            store.put(key, b"")
        with agreement.stage("seen") as stage:
            there = [found for found in store.list(ADMINISTRATION) if found.startswith(HOST_PROBES)]
            stage.payload = sorted(
                int(found.rpartition(".")[2]) for found in there if found.startswith(f"{HOST_PROBES}{token}.")
            )
        told = stage.payloads
        groups: list[list[int]] = agreement.lead("hosts", lambda: _groups(told))
        if agreement.rank == next(group[0] for group in groups if agreement.rank in group):
            store.delete(
                [found for found in there if f"{HOST_PROBES}{token}." not in found]
            )  # of jobs that were killed
        return Hosts(tuple([tuple(group) for group in groups]))
    finally:
        store.delete([key])


def _groups(told: Sequence[Any]) -> list[list[int]]:
    groups: list[list[int]] = []
    for rank, seen in enumerate(told):
        if rank not in seen or any(told[other] != seen for other in seen):
            raise NotSharedError(
                f"rank {rank} sees in its near directory what the ranks {seen} put there, and they do not all see "
                "the same: expected groups of processes that share a directory, and nothing with other groups; give "
                "each host a directory of its own"
            )
        if seen[0] == rank:
            groups.append(list(seen))
    return groups


class HostSteps:
    """All steps in the near directory of this host, also those that do not count."""

    def __init__(self, steps: StepDirectory, context: Context) -> None:
        """Look at nothing yet.

        Args:
            steps: the directory of this host; of its steps it knows those that count.
            context: options.
        """
        self._steps = steps
        self._context = context

    def local(self) -> Mapping[str, JSON]:
        """Return every step that is committed on this host, with its name and save id. Lists once, and reads each root."""
        found: dict[str, JSON] = {}
        for step, name in self._steps.list_names().items():
            try:
                data = root_bytes(subdirectory(self._steps.store, name))
                if data is None:
                    continue
                summary = summarize_root(data)
            except (CorruptCheckpointError, InvalidLocationError, UnsupportedVersionError) as error:
                logger.warning("step %d in %s does not count: %s", step, self._steps.display, error)
                continue
            if summary.committed:
                found[str(step)] = [name, summary.save_id]
        return found

    def find_names(
        self, agreement: Agreement, list_far: Callable[[], Mapping[int, str]]
    ) -> Sequence[Mapping[int, str]]:
        """Return the names of the steps that count near, and of those far. On every rank.

        Args:
            agreement: with the other processes.
            list_far: lists the far tier, on the leader.
        """
        with agreement.stage("near") as stage:
            stage.payload = dict(self.local())
        told = stage.payloads

        def find() -> JSON:
            far = {str(step): name for step, name in list_far().items()}
            agreed = {step: name for step, name in agreed_steps(told).items() if not self._steps.is_hidden(int(step))}
            return [agreed, far]

        found: Any = agreement.lead("list", find)
        return [{int(step): name for step, name in names.items()} for names in found]

    def sweep(self) -> None:
        """Remove steps of this host that do not count, if a newer one does. Only the owner of the directory may.

        Raises:
            StorageError
        """
        newest = self._steps.latest()
        if newest is None:
            return
        for text, told in self.local().items():
            step, name = int(text), str(told[0])  # type: ignore[index]  # as `local` makes it
            if step < newest and step not in self._steps.candidates() and not self._steps.is_hidden(step):
                logger.info("removing step %d from %s: it is not on all hosts", step, self._steps.display)
                durable = self._context.durability == "full"
                place = Within(self._steps.directory, name)
                location = resolve_location(
                    place, runtime_of(self._context).registry, durable=durable, config=self._context.storage
                )
                location.commits.remove(location, new_save_id(), runtime_of(self._context).conditions)


def is_whole_here(place: Place, context: Context) -> bool:
    """Return whether the objects of a step on this host have the sizes in its root. Other hosts may have the rest.

    Raises:
        CorruptCheckpointError: if a root cannot be read.
    """
    location = resolve_location(place, runtime_of(context).registry, durable=False, config=context.storage)
    return all(record.size == size for record, size in _objects_here(location).values())


def _objects_here(location: Location) -> Mapping[str, tuple[ObjectRecord, int]]:
    """Return, by key, the records of the objects on this host, with their actual sizes in bytes.

    Raises:
        CheckpointNotFoundError: if the step is not there.
        CorruptCheckpointError: if a root cannot be read.
    """
    store = location.store
    root = read_root(store)
    if root is None or isinstance(root, Claimed | PartialSave):
        raise CheckpointNotFoundError(f"there is no committed step at {location.display}; it was deleted")
    known: dict[str, ObjectRecord] = dict(root.objects) if isinstance(root, Root) else {}
    for entry in store.list_names() if not isinstance(root, Root) else ():
        member = read_root(subdirectory(store, entry[:-1])) if entry.endswith("/") else None
        if isinstance(member, Root):
            known.update({entry + key: record for key, record in member.objects.items()})
    return {key: (known[key], store.size(key)) for key in store.list() if key in known}


def agreed_steps(told: Sequence[Any]) -> dict[str, str]:
    """Return the names, by step, of those that every process sees on its host, of one save.

    Args:
        told: by rank, what `HostSteps.local` found.
    """
    first, *others = told
    return {step: found[0] for step, found in first.items() if all(other.get(step) == found for other in others)}
