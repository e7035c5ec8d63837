"""A simulated save of 405 billion parameters by up to 16,384 processes: the work of each process and of the leader.

The real code describes and plans, writes and encodes receipts, exchanges messages, checks that the boxes cover the
arrays, runs `finish` of the layouts, and builds the root. The rest is simulated: the arrays have no elements, messages
between processes go through a dictionary, and the storage only counts bytes. The layouts run for some of the processes:
see `benchmarks.scale_receipts`.

``python -m benchmarks --only scale`` prints a table. ``python -m benchmarks.scale_report FILE...`` creates the table
and the plot of the documentation from rows that ``python -m benchmarks.scale SIZE LAYOUT FILE`` wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import ckptcore
from benchmarks.report import Row
from benchmarks.scale_job import LAYERS, TrainingJob
from benchmarks.scale_receipts import JobReceipts, expect_alike
from benchmarks.scale_transport import CountingStore, DiscardingStorage, PlannedSnapshot, SimulatedCoordinator, Wire
from benchmarks.setting import Setting
from ckptcore.commit.root import Root
from ckptcore.commit.root_json import encode_root
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.job.agreement import Agreement, encode_outcome
from ckptcore.job.gathering import Gathering
from ckptcore.job.receipts import decode_receipts, encode_receipts
from ckptcore.model import Receipt, TreeMetadata
from ckptcore.planning import check_coverage, plan_write
from ckptcore.planning.partition import Owners, ReplicaOptions, SplitTree, owners_of
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.common_trees import tree_digest
from ckptcore.saving.descriptions import TreeDescription, describe_part
from ckptcore.saving.writing import merge_objects

LAYOUTS: Final = ("safetensors", "ocdbt", "zarr3", "dcp")

_SAVE_ID: Final = "0" * 16
_SIZES: Final = (64, 16384)
"""Numbers of processes of the jobs, ascending."""
_SECONDS: Final = 60.0
"""Limit of the total time of the leader."""
_MEMORY_HOSTS: Final = 100_000
_MEMORY_SECONDS: Final = 10.0
"""Limit of the time of the leader for each of what it does with steps in memory."""

T = TypeVar("T")


@dataclass(slots=True)
class Measured:
    """The costs of a save.

    Attributes:
        size, layout: number of processes, and the layout.
        chunks: boxes written by all processes.
        process: CPU seconds of a process that is not the first of a block, by stage.
        relay: CPU seconds in which the first process of the second block gathers the messages of its block, by stage.
        leader: CPU seconds of the leader, by stage.
        sent, received: bytes, by role: ``process``, ``relay``, ``leader``.
        messages: messages sent and received, by role.
        process_memory: peak of the bytes that Python and NumPy allocate in a process that plans and writes.
        leader_memory: increase of the peak resident memory, in bytes, while the leader gathers receipts and builds the
            root.
        root_bytes: bytes of the root and its parts.
        finished_bytes: bytes that the layout writes on the leader.
    """

    size: int
    layout: str
    chunks: int = 0
    process: dict[str, float] = field(default_factory=dict)
    relay: dict[str, float] = field(default_factory=dict)
    leader: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    process_memory: int = 0
    leader_memory: int = 0
    root_bytes: int = 0
    finished_bytes: int = 0


class Simulation:
    """One simulated save."""

    def __init__(self, job: TrainingJob, layout: str, *, replicas: ReplicaOptions | None = None) -> None:
        """Prepare a save.

        Args:
            job: the job.
            layout: the name of the layout.
            replicas: how replicas share the work; None: the default. No box may be so large that it is divided.
        """
        self._job = job
        self._replicas = replicas or ReplicaOptions()
        self._context = ckptcore.Context(durability="none")
        self._layout: Layout = runtime_of(self._context).registry.layout(layout)
        self._wire = Wire()
        self.measured = Measured(job.size, layout)

    def run(self) -> Measured:
        """Save.

        Raises:
            CheckpointError: the save failed.
            AssertionError: the receipt assembled for a process differs from that of the real code.
        """
        sample = min(1, self._job.size - 1)
        description, digest = self._prepare(sample)
        tree = description.tree
        owners = self._owners(description, sample)
        receipts = JobReceipts(
            self._job, self._layout.name, tree, owners, *_chunks_of(self._layout, tree, self._job.size)
        )
        self._write_really(receipts, tree, owners, sample)
        key = self._exchange("save/describe", lambda rank: digest, first=True)
        self._exchange(f"{key}/claim", lambda rank: None)
        self._leader_decides(f"{key}/write", receipts, tree)
        self._exchange(f"{key}/commit", lambda rank: None)
        self._count_messages()
        return self.measured

    def _prepare(self, rank: int) -> tuple[TreeDescription, str]:
        """Return the description of a process and its digest. Measure its CPU seconds and memory.

        Memory is measured in a separate, slower run, which also writes.
        """
        value = self._job.value(rank)
        shares = self._layout.capabilities.any_replica_writes
        replicas = self._replicas if shares else None

        def describe() -> TreeDescription:
            part = describe_part(
                "",
                value,
                self._layout,
                runtime_of(self._context).registry,
                rank=rank,
                size=self._job.size,
                replicas=replicas,
            )
            assert isinstance(part, TreeDescription)
            return part

        def prepare() -> None:
            description = describe()
            tree_digest(description)
            plan = description.plan(rank, self._job.size, _SAVE_ID)
            store = CountingStore(rank)
            state = self._layout.write(PlannedSnapshot(plan), store)
            encode_receipts([description.tree], [Receipt(rank, plan.items, state, tuple(store.objects))])

        prepare()  # imports modules, and creates formats that all saves of a process share
        tracemalloc.start()
        prepare()
        self.measured.process_memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds = self.measured.process
        description = _timed(seconds, "describe", describe)
        digest = _timed(seconds, "digest", lambda: tree_digest(description))
        _timed(seconds, "plan", lambda: description.plan(rank, self._job.size, _SAVE_ID))
        return description, digest

    def _owners(self, description: TreeDescription, rank: int) -> Mapping[int, Owners] | None:
        if description.shares is None:
            return None
        return owners_of(SplitTree(description.tree, description.shares.splits), rank=rank, size=self._job.size)

    def _write_really(
        self, receipts: JobReceipts, tree: TreeMetadata, owners: Mapping[int, Owners] | None, sample: int
    ) -> None:
        """Run the layout for sample processes, and compare their receipts with the assembled ones."""
        size = self._job.size
        for rank in sorted({0, sample, size // 3, size // 2, size - 1}):
            plan = plan_write(tree, self._job.shards(rank), rank=rank, size=size, save_id=_SAVE_ID, owners=owners)
            store = CountingStore(rank)
            seconds = self.measured.process if rank == sample else {}
            state = _timed(seconds, "layout", partial(self._layout.write, PlannedSnapshot(plan), store))
            receipt = Receipt(rank, plan.items, state, tuple(store.objects))
            expect_alike(receipts.receipt(rank), receipt)
            _timed(seconds, "encode", partial(encode_receipts, [tree], [receipt]))

    def _coordinator(self, rank: int) -> SimulatedCoordinator:
        return SimulatedCoordinator(self._wire, range(self._job.size), rank)

    def _say(self, key: str, payload: Callable[[int], Any], *, tokens: bool) -> None:
        """Send the messages of all processes but the leader.

        The first process of each block sends last, because it forwards the messages of the others.
        """
        for block in Gathering(self._coordinator(0)).blocks:
            for rank in reversed(block):
                if rank == 0:
                    continue
                outcome = encode_outcome(_token(rank) if tokens else None, payload(rank))
                gathering = Gathering(self._coordinator(rank))
                start = time.process_time()
                gathering.gather(key, outcome)
                if rank == self._relay:
                    self.measured.relay[key.rpartition("/")[2]] = time.process_time() - start

    def _hear(self, key: str, *, tokens: bool) -> bytes:
        """Receive the reply on all processes but the leader."""
        reply = b""
        for rank in range(1, self._job.size):
            gathering = Gathering(self._coordinator(rank))
            reply = gathering.broadcast_to_blocks(key, None) if tokens else gathering.broadcast(key, None)
        return reply

    def _exchange(self, key: str, payload: Callable[[int], Any], *, first: bool = False) -> str:
        """Run a stage with short messages. Return the prefix of the next keys."""
        prefix, _, name = key.rpartition("/")
        self._say(key, payload, tokens=first)
        if first:
            self._agreement = Agreement(self._coordinator(0), prefix)

        def lead() -> None:
            with self._agreement.stage(name) as stage:
                stage.payload = payload(0)

        _timed(self.measured.leader, "exchange", lead)
        verdict = json.loads(self._hear(f"{key}/verdict", tokens=first))
        return f"{prefix}/{verdict['leader']}" if first else prefix

    def _leader_decides(self, key: str, receipts: JobReceipts, tree: TreeMetadata) -> None:
        """Run the stage in which all processes send receipts, and the leader builds the root from them."""

        def encoded(rank: int) -> bytes:
            receipt = receipts.receipt(rank)
            self.measured.chunks += sum(receipt.items.counts.tolist())  # type: ignore[attr-defined]  # it has columns
            return encode_receipts([tree], [receipt])

        self._say(key, encoded, tokens=False)
        own = encoded(0)
        seconds = self.measured.leader
        before = _resident()

        def gather() -> Sequence[bytes]:
            with self._agreement.stage("write") as stage:
                stage.payload = own
            return [data for data in stage.payloads if isinstance(data, bytes)]

        gathered = _timed(seconds, "exchange", gather)
        self._hear(f"{key}/verdict", tokens=False)
        decoded = _timed(seconds, "decode", lambda: [decode_receipts([tree], data)[0] for data in gathered])
        _timed(seconds, "cover", lambda: check_coverage(tree, decoded))
        storage = DiscardingStorage()
        recorder = ObjectRecorder(storage, runtime_of(self._context).io_threads)
        state = _timed(seconds, "finish", lambda: self._layout.finish(tree, decoded, recorder))
        self.measured.finished_bytes = storage.nbytes

        def root() -> int:
            made = Root(
                save_id=_SAVE_ID,
                created="2026-01-01T00:00:00.000+00:00",
                writer={},
                layout=self._layout.name,
                state=state,
                tree=tree,
                objects=merge_objects(f"the layout {self._layout.name}", decoded, recorder.objects),
            )
            data, parts = encode_root(made)
            return len(data) + sum(map(len, parts.values()))

        self.measured.root_bytes = _timed(seconds, "root", root)
        self.measured.leader_memory = _peak() - before

    @property
    def _relay(self) -> int:
        """The first process of the second block, or -1 if there is only one block."""
        blocks = Gathering(self._coordinator(0)).blocks
        return blocks[1][0] if len(blocks) > 1 else -1

    def _count_messages(self) -> None:
        """Record the messages and bytes of each role. Each number is the maximum over the processes of the role."""
        firsts = {block[0] for block in Gathering(self._coordinator(0)).blocks}
        roles = {
            "leader": [0],
            "relay": sorted(firsts - {0}),
            "process": [rank for rank in range(1, self._job.size) if rank not in firsts],
        }
        for role, ranks in roles.items():
            self.measured.sent[role] = max((self._wire.sent[rank] for rank in ranks), default=0)
            self.measured.received[role] = max((self._wire.received[rank] for rank in ranks), default=0)
            self.measured.messages[role] = max((self._wire.messages[rank] for rank in ranks), default=0)


def _token(rank: int) -> str:
    return f"{rank:016x}"


def _timed(seconds: dict[str, float], name: str, work: Callable[[], T]) -> T:
    start = time.process_time()
    done = work()
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
    return done


def _chunks_of(
    layout: Layout, tree: TreeMetadata, size: int
) -> tuple[str | None, Mapping[int, str], Mapping[int, tuple[int, ...]]]:
    """Return the options that all processes agree on, names, and shapes of chunks, for layouts with chunks."""
    if layout.name not in ("ocdbt", "zarr3"):
        return None, {}, {}
    from ckptcore_orbax.zarr.stored_arrays import array_names, stored_format

    options = layout._layout_options()  # type: ignore[attr-defined]  # of the layouts of this plugin
    names = array_names(tree, options)
    records: Sequence[Any] = tree.leaves
    chunks = {leaf: stored_format(record, names[leaf], options, size).chunk for leaf, record in enumerate(records)}
    return options.description, names, chunks


def _resident() -> int:
    """Return the resident memory of this process in bytes, and reset the peak that `_peak` returns."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def rows(setting: Setting) -> Iterator[Row]:
    """Simulate saves of jobs, each in a new process."""
    for size in [size for size in _SIZES if size <= setting.count(_SIZES[-1], least=_SIZES[0])]:
        for layout in LAYOUTS:
            path = setting.directory / f"scale-{size}-{layout}.json"
            layers = setting.count(LAYERS)
            command = [sys.executable, "-m", "benchmarks.scale", str(size), layout, str(path), str(layers)]
            subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
            measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            seconds, own = sum(measured["leader"].values()), sum(measured["process"].values())
            case = f"scale: {size} processes, {measured['chunks']} chunks"
            target = f"at most {_SECONDS:.0f} s"
            yield Row(case, f"{layout}, the leader", seconds, target=target, reached=seconds <= _SECONDS)
            yield Row(case, f"{layout}, another process", own)
    yield from _memory_rows(setting)


def _memory_rows(setting: Setting) -> Iterator[Row]:
    """Simulate a job with steps in the memory of its hosts, in a new process."""
    size = setting.count(_MEMORY_HOSTS, least=_SIZES[0])
    path = setting.directory / "scale-memory.json"
    command = [sys.executable, "-m", "benchmarks.scale_memory", str(size), str(path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    target = f"at most {_MEMORY_SECONDS:.0f} s"
    for what, seconds in measured["seconds"].items():
        case = f"scale: {size} hosts with steps in memory"
        row = f"{what}, the leader: {measured['messages'][what]} messages"
        yield Row(case, row, seconds, target=target, reached=seconds <= _MEMORY_SECONDS)


def main(arguments: Sequence[str]) -> None:
    """Simulate one save and write its measurements."""
    size, layout, options, *layers = arguments
    job = TrainingJob.of_size(int(size), layers=int(layers[0]) if layers else LAYERS)
    measured = Simulation(job, layout).run()
    Path(options).write_text(json.dumps(asdict(measured)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
