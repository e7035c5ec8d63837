"""Versions of weights: bytes, and the times to publish, to prepare, to verify and to install, compared with others.

The weights are those of MiniLM after each step of fine-tuning, see `benchmarks.fine_tuned`. Each round publishes the
next version, prepares and installs it. All contenders have the weights in host memory. Their files are in memory, too,
because peers do not make all of their files durable. Rows of their own compare durable publishes on the disk.

- publish: from the weights in memory to a version that others can read.
- prepare: from a published version to a complete and verified local checkpoint. slime and SkyRL change their only local
  checkpoint in place and copy nothing: no version is complete meanwhile, and a crash leaves a mixture of two. The
  kernel of slime on a copy is what keeps the version before, as ckptcore does. The bound only copies the files of the
  version before, and hashes them: whatever keeps that version adds its decoding.
- verify: all bytes of the local checkpoint.
- install: from the local checkpoint into the weights of an engine in memory: the pause of the engine.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
import xxhash
from ckptcore_versions import Publisher, Version, follow
from ckptcore_versions.following.cache import complete_versions
from ckptcore_versions.following.local_files import CACHED_BLOCK_BYTES

import ckptcore
from benchmarks.alternating import Case, Contender, Times, run_once, timed_rows
from benchmarks.fine_tuned import Weights, fine_tuned, repeated
from benchmarks.local import write_raw
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.sharded_versions import sharded_rows
from benchmarks.version_peers import FULL, Peer, peers, size_of
from ckptcore.runtime import runtime_of

_RATES: Final = (3e-6, 3e-5, 1e-4)
"""Learning rates: of reinforcement learning, and of fine-tuning."""

_REPEATS: Final = 11
"""Copies of the model in the large case, 0.5 GB in all."""

_ROUNDS: Final = 5
"""The maximum number of rounds, because each takes a step of training."""

_OURS: Final = "ckptcore"
_FAST: Final = ckptcore.Context(durability="none")
_COPY_SHARE: Final = 0.8
"""Target: the time of the copy of the arrays that changed, divided by that of the installation."""

_COPY: Final = "bound: copy and hash, no decoding"
_WINDOW_BYTES: Final = 1 << 20

_SPEED: Final = 1.0
"""Target: the time of a peer divided by that of ckptcore."""


def rows(setting: Setting) -> Iterator[Row]:
    """Publish and follow versions with each learning rate, and a large model with the smallest one."""
    setting = replace(setting, rounds=min(setting.rounds, _ROUNDS))
    layers = setting.count(6)
    for rate in _RATES:
        versions = fine_tuned(rate, setting.rounds + 2, layers)
        yield from _compared(setting, f"lr {rate:g}", versions, 1)
        if rate == _RATES[0]:
            times = setting.count(_REPEATS)
            yield from _compared(setting, f"lr {rate:g}, {times} models", versions, times)
            yield from _durable(setting, f"lr {rate:g}", versions)
            yield from sharded_rows(setting, versions)


class _Trainer:
    """Our publisher, a follower, and the weights of an engine."""

    def __init__(self, directory: Path, context: ckptcore.Context) -> None:
        self._published, self._context = directory / "published", context
        self.cache = directory / "cache"
        self._stack = ExitStack()
        self._publisher = self._stack.enter_context(Publisher(self._published, context=context))
        self._follower = self._stack.enter_context(follow(self._published, cache=self.cache, context=context))
        self._number = -1
        self.version: Version

    def publish(self, weights: Weights) -> None:
        """Publish the next version."""
        self._number += 1
        self._publisher.publish(self._number, weights)

    def nbytes(self) -> int:
        """Return the bytes of the newest version."""
        return size_of(self._published / f"v{self._number:06d}")

    def prepare(self) -> None:
        """Prepare the newest version."""
        version = self._follower.next_version(0)
        assert version is not None and version.number == self._number
        self.version = version

    def verify(self) -> None:
        """Verify the files of the newest version in the cache."""
        newest = complete_versions(str(self.cache))[0]
        assert newest.is_intact(runtime_of(self._context).io_threads)

    def close(self) -> None:
        """Release the directories."""
        self._stack.close()


def _compared(setting: Setting, name: str, versions: Sequence[Weights], times: int) -> Iterator[Row]:
    """Publish, prepare, verify and install versions, of `times` models together."""
    nbytes = times * sum([tensor.nbytes for tensor in versions[0].values()])
    label = f"{name}, {nbytes / 1e6:.0f} MB"
    with TemporaryDirectory(prefix="ckptcore-bench-", dir="/dev/shm") as memory, ExitStack() as stack:
        place = Path(memory)
        first = repeated(versions[0], times)
        base = place / "base"
        base.mkdir()
        safetensors.torch.save_file(dict(first), base / "model.safetensors", {"format": "pt"})
        others = peers(base, place)
        ours = _Trainer(place / "ours", _FAST)
        stack.callback(ours.close)
        ours.publish(first)
        ours.prepare()
        served = {key: torch.zeros_like(tensor) for key, tensor in first.items()}
        ours.version.load_into(served)
        del first
        measured = _Measured(label, nbytes)
        for number, weights in enumerate(versions[1 : setting.rounds + 2], start=-1):
            new = repeated(weights, times)
            _round(measured, number, new, ours, others, served)
            for key, tensor in new.items():
                assert torch.equal(served[key].view(torch.int16), tensor.view(torch.int16)), f"{key} differs"
        yield from measured.rows()


class _Measured:
    """The measurements of all rounds: the times by phase and contender, and the bytes by contender."""

    def __init__(self, label: str, nbytes: int) -> None:
        self._label, self._nbytes = label, nbytes
        self._times: dict[str, dict[str, Times]] = {}
        self._contenders: dict[str, Sequence[Contender]] = {}
        self._bytes: dict[str, list[int]] = {}
        self.notes: dict[tuple[str, str], str] = {}

    def run(self, number: int, phase: str, contenders: Sequence[Contender]) -> None:
        """Run a phase of all contenders. Each round begins with another one. The round -1 is a warm-up."""
        self._contenders[phase] = contenders
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            into = self._times.setdefault(phase, {}).setdefault(contender.name, Times())
            run_once(contender, into if number >= 0 else Times())

    def count(self, number: int, name: str, nbytes: int) -> None:
        """Note the bytes of a version."""
        if number >= 0:
            self._bytes.setdefault(name, []).append(nbytes)

    def rows(self) -> Iterator[Row]:
        """Yield a row for each phase and contender."""
        counted = {name: median(values) for name, values in self._bytes.items()}
        least = min([value for name, value in counted.items() if name != _OURS], default=0)
        for name, value in counted.items():
            target = "at most those of the best peer" if name == _OURS else ""
            note = f"{self._nbytes / value:.1f} times smaller"
            yield Row(
                f"versions: bytes, {self._label}", name, value, "B", ratio=value / counted[_OURS],
                target=target, reached=not target or value <= least, note=note,
            )  # fmt: skip
        for phase, times in self._times.items():
            case = Case(f"versions: {phase}, {self._label}", self._contenders[phase], nbytes=self._nbytes)
            for row in timed_rows(case, times):
                least = min(times[row.contender].seconds)
                note = f"least {1e3 * least:.1f} ms, processors {1e3 * (row.cpu or 0):.1f} ms"
                yield replace(row, note="; ".join(filter(None, [self.notes.get((phase, row.contender)), note])))


def _round(
    measured: _Measured,
    number: int,
    weights: Weights,
    ours: _Trainer,
    others: Mapping[str, Peer],
    served: dict[str, torch.Tensor],
) -> None:
    """Bring one version from the trainer to the weights of the engine, with each contender."""

    def phase(name: str, mine: Callable[[], object], theirs: Mapping[str, Callable[[], object]]) -> None:
        contenders = [Contender(_OURS, mine)]
        contenders += [
            Contender(peer, run, target=None if peer in (FULL, _COPY) else _SPEED) for peer, run in theirs.items()
        ]  # fmt: skip
        measured.run(number, name, contenders)

    phase(
        "publish",
        lambda: ours.publish(weights),
        {name: partial(peer.publish, weights) for name, peer in others.items()},
    )
    measured.count(number, _OURS, ours.nbytes())
    for name, peer in others.items():
        measured.count(number, name, peer.nbytes())
    preparing: dict[str, Callable[[], object]] = {name: peer.prepare for name, peer in others.items()}
    before = ours.version.directory
    phase("prepare", ours.prepare, {**preparing, _COPY: partial(_copy_hashed, before, ours.cache.with_name("bound"))})
    local = safetensors.torch.load_file(others[FULL].local() / "model.safetensors")
    measured.run(
        number,
        "verify",
        [
            Contender(_OURS, ours.verify),
            Contender("XXH3-128 of each tensor", lambda: _digests(local, xxhash.xxh3_128)),
            Contender("SHA-256 of each tensor", lambda: _digests(local, hashlib.sha256)),
        ],
    )
    changed = {name: weights[name] for name in ours.version.changed}
    scratch = {name: torch.zeros_like(tensor) for name, tensor in changed.items()}
    measured.run(
        number,
        "install",
        [
            Contender(_OURS, lambda: ours.version.load_into(served)),
            Contender("memory copy of the changed arrays", lambda: _copy(changed, scratch), target=_COPY_SHARE),
            Contender("safetensors, loaded and copied", lambda: _reload(others[FULL].local(), scratch)),
        ],
    )
    share = ours.version.written_bytes / sum([tensor.nbytes for tensor in weights.values()])
    measured.notes["install", _OURS] = f"{share:.0%} of the bytes written"


def _copy_hashed(source: str, target: Path) -> None:
    """Copy the files of a version, and hash their blocks meanwhile: what keeping the version before takes by itself."""
    target.mkdir()
    for path in Path(source).glob("*.safetensors"):
        size, window = path.stat().st_size, memoryview(bytearray(_WINDOW_BYTES))
        with path.open("rb", 0) as present, (target / path.name).open("wb", 0) as copy:
            os.posix_fallocate(copy.fileno(), 0, size)
            while count := present.readinto(window):
                for start in range(0, count, CACHED_BLOCK_BYTES):
                    xxhash.xxh3_64_intdigest(window[start : min(start + CACHED_BLOCK_BYTES, count)])
                copy.write(window[:count])
    shutil.rmtree(target)


def _digests(tensors: Weights, digest: Callable[[Any], Any]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda tensor: digest(tensor.view(torch.uint8).numpy()).hexdigest(), tensors.values()))


def _copy(source: Weights, target: Weights) -> None:
    for name, tensor in source.items():  # in one thread: those of PyTorch wait for each other on a machine that is busy
        np.copyto(target[name].view(torch.int16).numpy(), tensor.view(torch.int16).numpy())


def _reload(directory: Path, target: Weights) -> None:
    loaded = safetensors.torch.load_file(directory / "model.safetensors")
    for name, tensor in target.items():
        tensor.copy_(loaded[name])


def _durable(setting: Setting, name: str, versions: Sequence[Weights]) -> Iterator[Row]:
    """Publish versions durably on the disk, compared with a write and a read of the same bytes."""
    nbytes = sum([tensor.nbytes for tensor in versions[0].values()])
    base = setting.directory / "base"
    base.mkdir()
    safetensors.torch.save_file(dict(versions[0]), base / "model.safetensors", {"format": "pt"})
    others = peers(base, setting.directory)
    ours = _Trainer(setting.directory / "ours", ckptcore.Context())
    try:
        ours.publish(versions[0])
        measured = _Measured(f"{name}, durable on a disk", nbytes)
        raw = [tensor.view(torch.uint8).reshape(-1).numpy() for tensor in versions[1].values()]
        file = setting.directory / "raw"
        write_raw(file, raw, nbytes)
        for number, weights in enumerate(versions[1 : setting.rounds + 2], start=-1):
            contenders = [Contender(_OURS, partial(ours.publish, weights))]
            contenders += [Contender(peer, partial(others[peer].publish, weights)) for peer in others]
            contenders += [
                Contender("raw write and fdatasync", lambda: write_raw(file, raw, nbytes, durable=True)),
                Contender("raw read, page cache", file.read_bytes),
            ]
            measured.run(number, "publish", contenders)
        yield from measured.rows()
    finally:
        ours.close()
