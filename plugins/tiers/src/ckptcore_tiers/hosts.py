"""Near directories of hosts: groups of processes that share one, and the steps that all hosts have."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.commit.location import AnyLocation, Location, SubPath, resolve_location
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.commit.root import Claim, PartialSave, Root
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import read_root, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    NotSharedError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import ObjectRecord
from ckptcore.model.tree import JSON
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.training.steps import StepDirectory

logger = logger_named("ckptcore.tiers")

_HOST_PROBES: Final = f"{INTERNAL_DIRECTORY}/host-"
"""Prefix of keys of temporary objects by which processes of one host find each other."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The processes of a job, grouped by the near directory that they share.

    Attributes:
        groups: ranks of each host, ascending. Each rank is in one group. The first rank of a group
            acts for its host.
    """

    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of a rank, including that rank."""
        return next(group for group in self.groups if rank in group)

    def first_of(self, rank: int) -> int:
        """Return the first rank on the host of a rank."""
        return self.group_of(rank)[0]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple([group[0] for group in self.groups])


def shards_key(save_id: str, rank: int) -> str:
    """Return the key of the temporary object in which a process lists its shards for its host during a save.

    `find_hosts` removes objects that a killed job left.
    """
    return f"{_HOST_PROBES}{save_id}.{rank}"


def find_hosts(agreement: Agreement, store: StorageBackend) -> Hosts:
    """Find the processes that share a near directory. Every rank must call this.

    Each process writes an object, and lists the objects of the other processes.

    Args:
        agreement: exchange with the other processes.
        store: near directory of this process.

    Raises:
        NotSharedError: if a process does not see its own object, or if processes that see each
            other's objects do not all see the same objects.
    """
    if agreement.size == 1:
        return Hosts(((0,),))
    token = agreement.lead("token", lambda: secrets.token_hex(8))
    key = f"{_HOST_PROBES}{token}.{agreement.rank}"
    try:
        with agreement.stage("put"):
            store.put(key, b"")
        with agreement.stage("seen") as stage:
            probes = [probe for probe in store.list(INTERNAL_DIRECTORY) if probe.startswith(_HOST_PROBES)]
            stage.payload = sorted(
                int(probe.rpartition(".")[2]) for probe in probes if probe.startswith(f"{_HOST_PROBES}{token}.")
            )
        seen = stage.payloads
        groups: list[list[int]] = agreement.lead("hosts", lambda: _group_ranks(seen))
        if agreement.rank == next(group[0] for group in groups if agreement.rank in group):
            # Remove the objects of killed jobs.
            store.delete([probe for probe in probes if f"{_HOST_PROBES}{token}." not in probe])
        return Hosts(tuple([tuple(group) for group in groups]))
    finally:
        store.delete([key])


def _group_ranks(seen: Sequence[Any]) -> list[list[int]]:
    """Group ranks that see the same objects.

    Args:
        seen: for each rank, the ranks whose objects it sees.
    """
    groups: list[list[int]] = []
    for rank, visible in enumerate(seen):
        if rank not in visible or any(seen[other] != visible for other in visible):
            raise NotSharedError(
                f"the near directory of rank {rank} has files of the ranks {visible}, but these ranks do not all see "
                "the same files: processes on one host must share one near directory, and hosts must not share it; "
                "use a separate directory on each host"
            )
        if visible[0] == rank:
            groups.append(list(visible))
    return groups


class HostSteps:
    """All steps in the near directory of this host, including steps that other hosts lack."""

    def __init__(self, steps: StepDirectory, context: Context) -> None:
        """Create the object without I/O.

        Args:
            steps: near directory of this host. It lists only complete steps, which all hosts have.
            context: options.
        """
        self._steps = steps
        self._context = context

    def list_local(self) -> Mapping[str, JSON]:
        """Return the name and the save id of every step that is committed on this host, by step number as text.

        Lists the directory once, and reads the root of each step.
        """
        steps: dict[str, JSON] = {}
        for step, name in self._steps.list_names().items():
            try:
                data = root_bytes(subdirectory(self._steps.store, name))
                if data is None:
                    continue
                summary = summarize_root(data)
            except (CorruptCheckpointError, InvalidLocationError, UnsupportedVersionError) as error:
                logger.warning("ignoring step %d in %s: %s", step, self._steps.display, error)
                continue
            if summary.committed:
                steps[str(step)] = [name, summary.save_id]
        return steps

    def find_names(
        self, agreement: Agreement, list_far: Callable[[], Mapping[int, str]]
    ) -> Sequence[Mapping[int, str]]:
        """Return the names of the complete near steps, and of the far steps. Every rank must call this.

        Args:
            agreement: exchange with the other processes.
            list_far: lists the far directory. Called on the leader.
        """
        with agreement.stage("near") as stage:
            stage.payload = dict(self.list_local())
        local = stage.payloads

        def find() -> JSON:
            far = {str(step): name for step, name in list_far().items()}
            complete = _steps_on_all_hosts(local)
            near = {step: name for step, name in complete.items() if not self._steps.is_hidden(int(step))}
            return [near, far]

        listed: Any = agreement.lead("list", find)
        return [{int(step): name for step, name in names.items()} for names in listed]

    def delete_incomplete(self) -> None:
        """Delete steps that other hosts lack and that are older than the newest complete step.

        Only the owner of the directory may call this.

        Raises:
            StorageError: if the directory cannot be listed, or a step cannot be deleted.
        """
        newest = self._steps.latest()
        if newest is None:
            return
        for text, entry in self.list_local().items():
            step, name = int(text), str(entry[0])  # type: ignore[index]  # a list, from `list_local`
            if step < newest and step not in self._steps.candidates() and not self._steps.is_hidden(step):
                logger.info("removing step %d from %s: other hosts lack it", step, self._steps.display)
                path = SubPath(self._steps.directory, name)
                location = resolve_location(path, runtime_of(self._context).storages, to_write=True)
                try:
                    location.commit_method.remove(location)
                except CheckpointNotFoundError:
                    pass  # another process deleted it
                except CheckpointExistsError as error:
                    self._steps.warn_once("step %d in %s stays: %s", step, self._steps.display, error)


def has_expected_sizes_on_host(step: AnyLocation, context: Context) -> bool:
    """Return True if the objects of a step on this host have the sizes in its root. Ignores objects on other hosts.

    Raises:
        CheckpointNotFoundError: if the step does not exist.
        CorruptCheckpointError: if a root cannot be read.
    """
    location = resolve_location(step, runtime_of(context).storages)
    return all(record.size == size for record, size in _objects_on_host(location).values())


def _objects_on_host(location: Location) -> Mapping[str, tuple[ObjectRecord, int]]:
    """Return the records of the objects on this host by key, with their actual sizes in bytes.

    Raises:
        CheckpointNotFoundError: if the step does not exist.
        CorruptCheckpointError: if a root cannot be read.
    """
    store = location.store
    root = read_root(store)
    if root is None or isinstance(root, Claim | PartialSave):
        raise CheckpointNotFoundError(f"{location.display}: no committed step; it was deleted")
    known: dict[str, ObjectRecord] = dict(root.objects) if isinstance(root, Root) else {}
    for entry in store.list_names() if not isinstance(root, Root) else ():
        member = read_root(subdirectory(store, entry[:-1])) if entry.endswith("/") else None
        if isinstance(member, Root):
            known.update({entry + key: record for key, record in member.objects.items()})
    return {key: (known[key], store.size(key)) for key in store.list() if key in known}


def _steps_on_all_hosts(local: Sequence[Any]) -> dict[str, str]:
    """Return the names of the steps that every process sees on its host, from the same save.

    Args:
        local: result of `HostSteps.list_local` on each rank.
    """
    first, *others = local
    return {step: names[0] for step, names in first.items() if all(other.get(step) == names for other in others)}
