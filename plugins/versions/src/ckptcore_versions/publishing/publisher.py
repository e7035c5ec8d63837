"""Publisher: publishes versions of weights, each as what changed since the version before."""

from __future__ import annotations

import os
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from ckptcore.commit.location import LocationLike
from ckptcore.commit.locks import IfInUse
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointError
from ckptcore.io.background import SaveHandle
from ckptcore.policies import PreservationPolicy
from ckptcore.protocols import Layout, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import Save, SaveDraft, as_integer
from ckptcore.select import Selection
from ckptcore.training.checkpointer import Checkpointer
from ckptcore_versions.held_version import VersionLayout
from ckptcore_versions.local_directory import local_directory
from ckptcore_versions.publishing.held_weights import HeldWeights, in_files_of, in_host_memory
from ckptcore_versions.publishing.version_saves import Publications, VersionRequest, VersionSave
from ckptcore_versions.version_directory import VERSION_NAMES, VersionDirectory

_CAPTURED_BYTES: Final = 256 << 20
"""Most bytes of weights that are copied and not yet encoded, if the base of the next version is in memory."""

_LONGEST_CHAIN: Final = 1000
"""Loads refuse much longer chains: they may be hostile."""


class Publisher:
    """Publishes versions of weights to a directory, in a job of one process or of several.

    A version is a checkpoint whose step is the number of the version. Most versions are deltas: they store what changed
    since the version before. Each process encodes the boxes that it holds.

    It owns the directory, as a `Checkpointer` does: a second Publisher for the same directory raises an error. Use it
    as a context manager, or close it. In a job of several processes every process creates a Publisher, and calls the
    same methods in the same order.

    A process holds one copy of the boxes that it publishes: those of the newest version. It is in host memory, or in a
    mapped file of `base_directory`. A publish also uses host memory for weights that are copied and not encoded yet:

    - Without `base_directory`, at most 256 MiB, or the largest array if that is larger. `publish` with
      ``background=True`` returns when the last array is copied, so most of the encoding is done by then. The option
      ``MemoryOptions(save_bytes=...)`` of the context changes the limit.
    - With `base_directory`, all weights, so that `publish` with ``background=True`` returns once they are copied. The
      kernel can write the mapped copy to the disk.
    """

    def __init__(
        self,
        location: LocationLike,
        *,
        layout: str | Layout = "deltas",
        run: str | None = None,
        keep: PreservationPolicy | None = None,
        full_every: int = 100,
        select: Selection | None = None,
        digests: bool = False,
        base_directory: LocationLike | None = None,
        if_in_use: IfInUse = "error",
        context: Context | None = None,
    ) -> None:
        """Own a directory of versions. Create it if it does not exist.

        Args:
            location: a path or URL.
            layout: the layout of the versions.
            run: the name of the training run, for the labels; None: the name in the newest version, or a random name.
            keep: chooses the versions to keep; None: all. The versions that a kept version needs are kept, and those
                that a reader has pinned.
            full_every: the maximum number of versions from one full version to the next. A version is also full if the
                deltas since the last full version take as many bytes as that one. 1: every version is full.
            select: the leaves to publish, such as ``ckptcore.select.glob("**/*lora_*")`` for adapters; None: all.
            digests: True to label every array with the SHA-256 of its elements. Each array must be held by one process
                as a whole.
            base_directory: a local directory for the copy of the newest version; None: host memory.
            if_in_use: as for `Checkpointer`.
            context: options.

        Raises:
            DirectoryInUseError: another job owns the directory.
            InvalidLocationError: the location or `base_directory` is none.
            StorageError: the directory cannot be written.
            TypeError, ValueError: an argument has a wrong type or value.
            UnknownPluginError: the layout is unknown.
            CheckpointError: other processes of a single controller hold the weights.
            The errors of `Checkpointer`.
        """
        context = context or default_context()
        full_every = as_integer("full_every", full_every)
        if not 1 <= full_every <= _LONGEST_CHAIN:
            raise ValueError(f"full_every={full_every}: expected a number of versions from 1 to {_LONGEST_CHAIN}")
        if select is not None and not isinstance(select, Selection):
            raise TypeError(
                f"select={select!r}: expected a selection of ckptcore.select, such as select.glob('lora_*')"
            )
        if run is not None and not isinstance(run, str):
            raise TypeError(f"run={run!r}: expected the name of the training run, as a str")
        runtime = runtime_of(context)
        if runtime.workers() is not None:
            raise CheckpointError(
                "a Publisher cannot publish weights that workers of a single controller hold: publish in a job of the "
                "processes that hold them"
            )
        version_layout = runtime.registry.layout(layout)
        if not isinstance(version_layout, VersionLayout):
            raise TypeError(f"layout={layout!r} cannot write versions: expected a layout of versions, such as 'deltas'")
        memory = context.memory
        if base_directory is None and memory.save_bytes is None:
            memory = replace(memory, save_bytes=_CAPTURED_BYTES)
        context = replace(context, memory=memory)  # a Context of its own, so that no publish waits for other saves
        directory = VersionDirectory(location)
        self._context = context
        self._publications = Publications(
            directory=directory,
            layout=version_layout,
            held=HeldWeights(
                in_host_memory
                if base_directory is None
                else in_files_of(local_directory("base_directory", base_directory))
            ),
            full_every=full_every,
            run=run,
            select=select,
            digests=digests,
        )
        self._checkpointer = Checkpointer(
            directory,
            layout=version_layout,
            preservation_policy=keep,
            step_names=version_layout.version_names or VERSION_NAMES,
            if_in_use=if_in_use,
            strategy=_VersionStrategy(self._publications),
            context=context,
        )

    def __repr__(self) -> str:
        return f"<Publisher {self.directory!r}>"

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it. An error of the block propagates, with a note if closing failed, too."""
        self._checkpointer.__exit__(kind, error, traceback)

    @property
    def directory(self) -> str:
        """The directory as users see it: without secrets, and with ``~`` expanded."""
        return self._checkpointer.directory

    @property
    def latest(self) -> int | None:
        """The number of the newest committed version; None if there is none."""
        return self._checkpointer.latest

    def publish(
        self,
        version: int,
        weights: object,
        *,
        step: int | None = None,
        full: bool = False,
        background: bool = False,
    ) -> SaveHandle:
        """Publish weights as a version.

        Waits for a version that is still being published. An error of a publish in the background that was not
        retrieved is raised by the next publish, by `wait` or by `close`.

        Args:
            version: its number, higher than that of every version before.
            weights: a tree of arrays, or a module, as for `ckptcore.save`.
            step: the training step of the weights, for the labels.
            full: True to write a full version, so that late joiners need no earlier version.
            background: True to return once the weights may be changed.

        Returns:
            The handle of the publish, which is done if `background` is False.

        Raises:
            ValueError: the number is not higher than that of the newest version.
            SaveLostError: another job owns the directory now, or the base was deleted. Nothing was published.
            The errors of `ckptcore.save`.
        """
        version = as_integer("version", version, hint=". Nothing was published")
        step = None if step is None else as_integer("step", step, hint=". Nothing was published")
        runtime_of(self._context).saves.wait()
        latest = self._checkpointer.latest
        if latest is not None and version <= latest:
            raise ValueError(
                f"version={version}: {self.directory} has version {latest} already, and the numbers of versions "
                f"increase; publish version {latest + 1}. Nothing was published"
            )
        self._publications.request = VersionRequest(version, step, latest, full)
        handle = self._checkpointer.save(version, weights)
        assert handle is not None  # every publish is saved
        if not background:
            handle.result()
        return handle

    def wait(self) -> None:
        """Wait until every publish and deletion has ended. Raises their errors. See `Checkpointer.wait`."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Wait, and release the directory. See `Checkpointer.close`."""
        self._checkpointer.close()


class _VersionStrategy:
    """The `StepStrategy` of a Publisher."""

    layouts: tuple[str | Layout, ...] = ()

    def __init__(self, publications: Publications) -> None:
        self._publications = publications

    def check(self, steps: str | os.PathLike[str]) -> None:
        """Refuse nothing: the Publisher has checked its options."""

    def for_step(self, step: int, name: str, strategy: SaveStrategy[SaveDraft, Save]) -> SaveStrategy[SaveDraft, Save]:
        """Return the strategy of a version."""
        request = self._publications.request
        assert request is not None  # `Publisher.publish` has set it
        assert request.number == step
        return VersionSave(self._publications, request)
