"""Storages that temporarily lose something, such as permissions or space, while a run saves to them.

To add a storage, write a function that returns a `Place`: the directory, and the faults.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from ckptcore_testing import (
    FaultProxy,
    HTTPAnswer,
    LoseAnswer,
    ProxiedRequest,
    RequestFault,
    ResetRequest,
    StoreDialect,
)
from ckptcore_testing.request_faults import Refuse

from ckptcore import Checkpointer, CheckpointReader, Context
from ckptcore.context import IOOptions
from ckptcore.errors import CheckpointError
from ckptcore.events import Event
from ckptcore.policies import LatestN
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory
from tests.object_stores.stores import STORES
from tests.storage.mounts import Mounts

_KEPT: Final = 4
_ATTEMPTS: Final = 4
"""Number of failed saves of a step after which all faults end."""


class Fault(NamedTuple):
    """Something that a storage can lose temporarily.

    Attributes:
        name: the name of the fault.
        take, give: functions that begin and end the fault.
    """

    name: str
    take: Callable[[], None]
    give: Callable[[], None]


class Place(NamedTuple):
    """A storage for a run.

    Attributes:
        directory: the directory of the run.
        faults: the possible faults.
        context: options of the run.
        direct: options of a reader without faults.
    """

    directory: str
    faults: Sequence[Fault]
    context: Context = Context(durability="none")
    direct: Context = Context()


class _Moments:
    """Random moments at which faults begin or end. Thread-safe."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self._faults = faults
        self._random = random.Random(seed)
        self._taken: list[Fault] = []
        self._lock = threading.Lock()
        self._is_held = False

    def pass_one(self, event: Event | None = None) -> None:
        """Pass one moment, at which a fault may begin or end."""
        with self._lock:
            if self._is_held or self._random.random() > 0.1:
                return
            if self._taken and self._random.random() < 0.6:
                self._taken.pop(self._random.randrange(len(self._taken))).give()
                return
            left = [fault for fault in self._faults if fault not in self._taken]
            if left:
                self._taken.append(self._random.choice(left))
                self._taken[-1].take()

    def hold(self) -> None:
        """End all faults, and begin none until `resume`."""
        with self._lock:
            self._is_held = True
            while self._taken:
                self._taken.pop().give()

    def resume(self) -> None:
        """Allow faults again after `hold`."""
        with self._lock:
            self._is_held = False


def _state(step: int, attempt: int) -> dict[str, object]:
    return {"w": np.full(20_000, step, np.float32), "step": step, "attempt": attempt}


def _settle(saver: Checkpointer) -> None:
    """Wait for the deletions. The first wait may raise errors that a fault caused earlier."""
    try:
        saver.wait()
    except CheckpointError:
        saver.wait()


def _use(saver: Checkpointer, step: int) -> bool:
    """Load the newest step, and delete another one. Return False if a fault prevented it."""
    try:
        assert saver.load()["step"] == step
        if step % 7 == 3:
            saver.delete(step - 1)
            saver.wait()
    except CheckpointError:
        return False
    return True


def run(place: Place, seed: int, saves: int) -> None:
    """Save steps in one run, and retry each step until it is saved. Assert that no step is lost."""
    moments = _Moments(place.faults, seed)
    context = dataclasses.replace(place.context, observers=[moments.pass_one])
    failed = 0
    attempts: dict[int, int] = {}
    try:
        with Checkpointer(place.directory, preservation_policy=LatestN(_KEPT), context=context) as saver:
            for step in range(saves):
                for attempt in itertools.count():
                    moments.pass_one()
                    attempts[step] = attempt
                    try:
                        saver.save_blocking(step, _state(step, attempt), overwrite="non-atomic" if attempt else False)
                        break
                    except CheckpointError:
                        failed += 1
                        assert attempt <= _ATTEMPTS + 1, (
                            f"seed {seed}: step {step} cannot be saved, and nothing is away"
                        )
                    if attempt == _ATTEMPTS:
                        moments.hold()
                moments.resume()
                failed += step % 5 == 0 and not _use(saver, step)
            moments.hold()
            _settle(saver)
            saver.save_blocking(saves, _state(saves, 0))
            attempts[saves] = 0
            _settle(saver)
    finally:
        moments.hold()
    reader = CheckpointReader(place.directory, context=place.direct)
    expected = range(max(0, saves + 1 - _KEPT), saves + 1)
    # If a fault prevented the removal of a lease, the step stays until the lease expires.
    pinned = [
        int(name) for name in StepDirectory(place.directory, StepNames(), place.direct).commit_method().locks().pinned()
    ]
    assert set(expected) <= set(reader.steps) <= {*expected, *pinned}, f"seed {seed}: {reader.steps}"
    for step in expected:
        loaded = reader.load(step)
        assert loaded["step"] == step and (loaded["w"] == step).all(), f"seed {seed}"
        assert loaded["attempt"] == attempts[step], f"seed {seed}: step {step} is of an earlier save"
    assert failed, f"seed {seed}: nothing failed, so this tested nothing"


def _rights(directory: Path) -> Fault:
    """Return the loss of the permission to create, rename and delete entries of a directory. It also affects root."""
    return Fault("rights", lambda: _call("chattr", "+i", directory), lambda: _call("chattr", "-i", directory))


def _call(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def _full(directory: Path) -> Fault:
    """Return the loss of free space or of free inodes of a file system, whichever ends first."""
    fillers: list[Path] = []

    def take() -> None:
        size = 1 << 22
        while size:
            path = directory / f"filler-{len(fillers)}"
            fillers.append(path)
            try:
                path.write_bytes(bytes(size))
            except OSError:
                size //= 4

    def give() -> None:
        while fillers:
            fillers.pop().unlink(missing_ok=True)

    return Fault("room", take, give)


def _mounted(mounts: Mounts, source: Path, kind: str) -> Place:
    """Return a run on a second mount of a file system."""
    view = mounts.view(source, kind)
    (directory := view.path / "run").mkdir()

    def give() -> None:
        below = list(view.path.rglob("*"))
        assert below == [], "created below the mount point"
        view.give()

    faults = [
        _full(source),
        Fault("mount", view.take, give),
        _rights(source / "run"),
    ]
    return Place(str(directory), faults)


def _quota_of_xfs(mounts: Mounts) -> Place:
    """Return a run in a project of XFS whose quota shrinks to zero."""
    at = mounts.disk("xfs", 320, "prjquota")
    (directory := at / "run").mkdir()

    def limit(mib: int) -> None:
        mounts.run("xfs_quota", "-x", "-c", f"limit -p bhard={mib}m 7", str(at))

    mounts.run("xfs_quota", "-x", "-c", f"project -s -p {directory} 7", str(at))
    return Place(str(directory), [Fault("quota", lambda: limit(1), lambda: limit(200)), _rights(directory)])


def _quota(mounts: Mounts) -> Place:
    """Return a run on a FUSE file system that reports an exceeded quota, for kernels without quotas."""
    at = mounts.odd("")
    mark = at.parent / "source.quota"
    (at / "run").mkdir()
    return Place(str(at / "run"), [Fault("quota", mark.touch, mark.unlink), _rights(at.parent / "source" / "run")])


class _Taken:
    """Faults of a service: the network loses requests or answers, or the service refuses the credentials."""

    def __init__(self, refusal: HTTPAnswer) -> None:
        self._refusal = refusal
        self.is_network_away = self.is_identity_away = False

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        if self.is_network_away:
            return [LoseAnswer() if request.number % 3 == 0 else ResetRequest()]
        return [Refuse(self._refusal)] if self.is_identity_away else []

    def fault(self, name: str) -> Fault:
        """Return the fault that sets an attribute."""
        return Fault(name, lambda: setattr(self, name, True), lambda: setattr(self, name, False))


_REFUSALS: Final = {
    "s3": (
        403,
        "Forbidden",
        "application/xml",
        b"<Error><Code>InvalidAccessKeyId</Code><Message>gone</Message></Error>",
    ),
    "gs": (401, "Unauthorized", "application/json", b'{"error": {"code": 401, "errors": [{"reason": "authError"}]}}'),
}


def _service(mounts: Mounts, scheme: str) -> Place:
    """Return a run on an object store whose network and credentials fail temporarily."""
    store = mounts.enter(STORES[scheme])
    taken = _Taken(HTTPAnswer.make(*_REFUSALS[scheme]))
    proxy = mounts.enter(lambda _: FaultProxy(store.upstream, taken, dialect=store.dialect))
    config = {**store.config(proxy.url), "retries": 1}
    return Place(
        store.new_place("passing"),
        [taken.fault("is_network_away"), taken.fault("is_identity_away")],
        Context(storage={scheme: config}, io=IOOptions(threads=2)),
        store.direct,
    )


PLACES: Final[dict[str, Callable[[Mounts], Place]]] = {
    "ext4": lambda mounts: _mounted(mounts, mounts.disk("ext4", 24), "bind"),
    "inodes": lambda mounts: _mounted(mounts, mounts.tmpfs(64, files=200), "bind"),
    "tmpfs": lambda mounts: _mounted(mounts, mounts.tmpfs(8), "bind"),
    "xfs": lambda mounts: _mounted(mounts, mounts.disk("xfs", 320), "bind"),
    "overlay": lambda mounts: _mounted(mounts, mounts.overlay(), "bind"),
    "bindfs": lambda mounts: _mounted(mounts, mounts.disk("ext4", 24), "bindfs"),
    "quota": _quota,
    "quota-of-xfs": _quota_of_xfs,
    "s3": lambda mounts: _service(mounts, "s3"),
    "gs": lambda mounts: _service(mounts, "gs"),
}
