"""The processes that `benchmarks.recovery` kills: forked from a process that has imported the libraries.

``python -m benchmarks.recovery_processes`` reads requests from its standard input, one JSON list in a line: ``["fork",
{...}]`` forks a process with the fields of a `Member` and prints its id; ``["wait", [ids]]`` waits for the end of
processes; ``["import", [names]]`` imports modules that the first processes have imported, so that later ones need not.
A process writes a JSON object to `Member.output`: what it measured, or its error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.connections import ServerConnections
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from xxhash import xxh3_64_digest

import ckptcore
from ckptcore.events import Event
from ckptcore.plugins import installed_plugins
from ckptcore.policies import SpecificSteps

HAS_TORCHFT: Final = find_spec("torchft") is not None
HAS_LM_RESILIENCY: Final = find_spec("lm_resiliency") is not None

if HAS_TORCHFT:
    from torchft.checkpointing.http_transport import HTTPTransport
if HAS_LM_RESILIENCY:
    from lm_resiliency.checkpointing import (
        InMemoryCheckpointManager,
        InMemoryCkptConfig,
        TorchDistTransfer,
    )  # fmt: skip

ARRAYS: Final = 16
COLUMNS: Final = 1024
JOB: Final = "benchmark"
MEMORY_BYTES: Final = 1 << 40
IDLE_SECONDS: Final = 120.0
"""Memory servers end after this time without a process of the job."""

MEMORY: Final = "ckptcore, memory of peers"
COLD: Final = "ckptcore, memory, no server yet"
DISK: Final = "ckptcore, disk"
DCP: Final = "DCP, disk"
TORCHFT: Final = "torchft HTTPTransport"
LM_RESILIENCY: Final = "lm-resiliency"
LM_TRANSFER: Final = "lm-resiliency TorchDistTransfer"
SOCKET: Final = "a TCP socket"
PLAIN: Final = "plain sockets, verified"
TMPFS: Final = "ckptcore, directory in memory"
NOTHING: Final = "no saves"

_STEPS: Final = 24
_PRODUCTS: Final = 40
"""Products of matrices in a step of training."""

_TIMEOUT: Final = timedelta(seconds=120)

_BLOCK: Final = 1 << 16
"""Bytes that `_Plain` verifies at once."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a job.

    Attributes:
        contender: the library, such as `MEMORY`.
        task: ``prepare``: save and wait for the kill. ``hold``: a healthy replica, which is not killed. ``recover``.
            ``train``.
        directory: the directory of the contender, which all processes see.
        host: the directory with the memory of the host.
        rank, size: the rank, and the number of processes.
        port: the port of the job's store.
        rows: rows of each array of the whole state, a multiple of `size`.
        address: the address of rank 0.
        interface: the address of this host.
        every: save at each so-manieth step of ``train``; 0 for never.
        bytes_per_second: see `PeerMemory`.
    """

    contender: str
    task: str
    directory: str
    host: str
    rank: int
    size: int
    port: int
    rows: int
    address: str = "127.0.0.1"
    interface: str = "127.0.0.1"
    every: int = 0
    bytes_per_second: float | None = None

    @property
    def output(self) -> Path:
        """The file that the process writes when it is ready, or has recovered."""
        return Path(self.directory) / f"{self.task}-{self.rank}.json"


class _Method(Protocol):
    """The calls with which a library saves and recovers."""

    def save(self, state: Mapping[str, DTensor]) -> None:
        """Save a step so that it survives the kill."""

    def agree(self) -> None:
        """Find out what is loaded from where."""

    def load(self, state: Mapping[str, DTensor]) -> float:
        """Load into the state. Return the seconds of moving bytes."""


class _Ours:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._events: list[Event] = []

    def _open(self) -> ckptcore.Checkpointer:
        directory: Any = Path(self._member.directory) / "run"
        if self._member.contender in (MEMORY, COLD):
            os.environ[DIRECTORY_VARIABLE] = self._member.host
            directory = PeerMemory(
                directory,
                job=JOB,
                memory_bytes=MEMORY_BYTES,
                upload_policy=SpecificSteps([]),
                interface=self._member.interface,
                idle_seconds=IDLE_SECONDS,
                bytes_per_second=self._member.bytes_per_second,
            )
        elif self._member.contender == TMPFS:
            directory = Path(self._member.host).parent / "run"
        context = ckptcore.Context(observers=[self._events.append])
        return ckptcore.Checkpointer(directory, context=context, if_in_use="take over")

    def train(self, state: Mapping[str, DTensor], steps: int) -> Mapping[str, Any]:
        """Train, and save every few steps. Return the seconds of steps, of saves that block, and of their copies.

        ``shares``: the processor time of the calling thread in each save, divided by that of a plain copy of the state.
        """
        weights = torch.ones(256, 256)
        all_steps, blocked, shares = [], [], []
        copies = {name: array.to_local().clone() for name, array in state.items()}
        with contextlib.nullcontext() if self._member.contender == NOTHING else self._open() as run:
            for step in range(1, steps + 1):
                start = time.monotonic()
                for _ in range(_PRODUCTS):
                    weights = torch.tanh(weights @ weights)
                computed = time.monotonic()
                if run is not None and self._member.every and step % self._member.every == 0:
                    used = time.thread_time()
                    run.save(step, dict(state))
                    used = time.thread_time() - used
                    blocked.append(time.monotonic() - computed)
                    start_of_copy = time.thread_time()
                    _fill(state, copies)
                    shares.append(used / (time.thread_time() - start_of_copy))
                all_steps.append(computed - start)
        waited = [event.seconds for event in self._events if event.phase == "wait_for_previous"]
        copied = [event.seconds for event in self._events if event.phase == "copy"]
        return {"steps": all_steps, "blocked": blocked, "waited": waited, "copied": copied, "shares": shares}

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`."""
        run = self._run = self._open()
        if self._member.contender == DISK and run.latest is not None:
            return
        run.save(0 if run.latest is None else run.latest + 1, dict(state))
        run.wait()

    def agree(self) -> None:
        """See `_Method`."""
        self._run = self._open()
        assert self._run.latest is not None

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        self._run.load_into(dict(state))
        return sum([event.seconds for event in self._events if event.phase == "read"])


class _TimedReader(FileSystemReader):
    """A reader of DCP that measures its reads."""

    seconds = 0.0

    def read_data(self, *arguments: Any) -> Any:
        """Read, as DCP asks."""
        start = time.monotonic()
        done = super().read_data(*arguments)
        done.wait()
        self.seconds += time.monotonic() - start
        return done


class _Dcp:
    def __init__(self, member: Member) -> None:
        self._path = Path(member.directory) / "run"

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`."""
        if not self._path.exists():
            dist.barrier()
            dcp_save(dict(state), checkpoint_id=self._path)

    def agree(self) -> None:
        """See `_Method`."""
        self._reader = _TimedReader(self._path)

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        dcp_load(dict(state), storage_reader=self._reader)
        return self._reader.seconds


class _TorchFt:
    """A replica group of as many processes is healthy. Each killed process gets its state from one of them."""

    def __init__(self, member: Member) -> None:
        self._transport: Any = HTTPTransport(timeout=_TIMEOUT, num_chunks=0)
        self._address = Path(member.directory) / f"address-{member.rank}"
        self._interface = member.interface

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`. Nothing is saved."""

    def hold(self, state: Mapping[str, torch.Tensor]) -> None:
        """Offer the state to the processes that recover."""
        self._transport.send_checkpoint([0], 1, dict(state), _TIMEOUT)
        port = self._transport.metadata().rpartition(":")[2]
        self._address.write_text(f"http://{self._interface}:{port}", encoding="ascii")

    def agree(self) -> None:
        """See `_Method`. The address is known already."""

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        start = time.monotonic()
        received = self._transport.recv_checkpoint(0, self._address.read_text(encoding="ascii"), 1, _TIMEOUT)
        stop = time.monotonic()
        _fill(state, received)
        return stop - start


class _Plain:
    """The bound: servers that know all, and processes that receive and verify their own part, without agreement."""

    def __init__(self, member: Member) -> None:
        self._interface, self._address = member.interface, Path(member.directory) / f"address-{member.rank}"

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`. Nothing is saved."""

    def hold(self, state: Mapping[str, torch.Tensor]) -> None:
        """Serve the part of a process from a memory file system: checksums of its blocks, then all its bytes."""
        arrays = [tensor.numpy().data.cast("B") for tensor in state.values()]
        sums = b"".join(map(xxh3_64_digest, _blocks(arrays)))
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(b"".join(arrays))
            file.flush()
            data = mmap.mmap(file.fileno(), 0)
        listener = socket.create_server((self._interface, 0))
        self._address.write_text(str(listener.getsockname()[1]), encoding="ascii")

        def serve() -> None:
            connection, _ = listener.accept()
            connection.sendall(sums)
            connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()

    def agree(self) -> None:
        """See `_Method`. The address is known already."""

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        start = time.monotonic()
        arrays = [tensor.to_local().numpy().data.cast("B") for tensor in state.values()]
        connection = socket.create_connection((self._interface, int(self._address.read_text(encoding="ascii"))))
        blocks = _blocks(arrays)
        sums = bytearray(8 * len(blocks))
        for number, block in enumerate([memoryview(sums), *blocks]):
            rest = block
            while len(rest):
                rest = rest[connection.recv_into(rest) :]
            assert not number or xxh3_64_digest(block) == sums[8 * number - 8 : 8 * number]
        return time.monotonic() - start


def _blocks(arrays: Sequence[memoryview]) -> list[memoryview]:
    return [array[first : first + _BLOCK] for array in arrays for first in range(0, len(array), _BLOCK)]


class _LmResiliency:
    """Processes keep copies of each other. Those that end normally write them to files, which are in memory here."""

    def __init__(self, member: Member) -> None:
        config = InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=str(Path(member.host).parent / "files"),
            run_id=JOB,
            pin_memory=False,
        )
        self._manager: Any = InMemoryCheckpointManager(config)

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`."""
        self._manager.save({name: array.to_local() for name, array in state.items()}, 1)
        self._manager.finalize_replication()

    def agree(self) -> None:
        """See `_Method`. Its load agrees on the step."""

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        start = time.monotonic()
        received, _ = self._manager.load("latest")
        stop = time.monotonic()
        _fill(state, received)
        return stop - start


class _LmTransfer:
    """Rank 0 has the copy of the other rank, and sends it. Used between two processes."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`. Nothing is saved."""

    def agree(self) -> None:
        """See `_Method`."""
        self._transfer: Any = TorchDistTransfer(self._member.rank)
        other = dataclasses.replace(self._member, rank=1)
        self._copy = [_local(other, number) for number in range(ARRAYS)] if self._member.rank == 0 else []

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        start = time.monotonic()
        if self._member.rank == 0:
            self._transfer.serve(self._copy, "state", 1, os.uname().nodename)
        else:
            self._transfer.fetch([array.to_local() for array in state.values()], "state", 0, os.uname().nodename)
        stop = time.monotonic()
        if self._member.rank == 0:
            _fill(state, {name: _local(self._member, number) for number, name in enumerate(state)})
        return stop - start


class _Socket:
    """Rank 0 has the bytes of the other rank, and sends them. The limit for all others."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def save(self, state: Mapping[str, DTensor]) -> None:
        """See `_Method`. Nothing is saved."""

    def agree(self) -> None:
        """See `_Method`."""
        other = dataclasses.replace(self._member, rank=1)
        self._copy = [_local(other, number).numpy() for number in range(ARRAYS)] if self._member.rank == 0 else []
        port = torch.zeros(1, dtype=torch.int64)
        if self._member.rank == 0:
            self._listener = socket.create_server((self._member.interface, 0))
            port[0] = self._listener.getsockname()[1]
        dist.broadcast(port, 0)
        self._port = int(port)

    def load(self, state: Mapping[str, DTensor]) -> float:
        """See `_Method`."""
        if self._member.rank == 0:
            connection, _ = self._listener.accept()
            start = time.monotonic()
            for array in self._copy:
                connection.sendall(array.data)
            connection.recv(1)
            stop = time.monotonic()
            _fill(state, {name: _local(self._member, number) for number, name in enumerate(state)})
            return stop - start
        connection = socket.create_connection((self._member.address, self._port))
        start = time.monotonic()
        for tensor in state.values():
            buffer = tensor.to_local().numpy().data.cast("B")
            while len(buffer):
                buffer = buffer[connection.recv_into(buffer) :]
        stop = time.monotonic()
        connection.sendall(b"1")
        return stop - start


_METHODS: Final[Mapping[str, Callable[[Member], _Method]]] = {
    MEMORY: _Ours, COLD: _Ours, DISK: _Ours, DCP: _Dcp, TORCHFT: _TorchFt, LM_RESILIENCY: _LmResiliency,
    LM_TRANSFER: _LmTransfer, SOCKET: _Socket, PLAIN: _Plain,
}  # fmt: skip


def _fill(state: Mapping[str, DTensor], received: Mapping[str, torch.Tensor]) -> None:
    """Copy what was received into the state, as `load_state_dict` of a module does."""
    for name, array in state.items():
        array.to_local().copy_(received[name])


def _local(member: Member, number: int) -> torch.Tensor:
    """Return the part of an array that belongs to a process."""
    rows = member.rows // member.size
    first = (number * member.rows + member.rank * rows) * COLUMNS
    return torch.arange(first, first + rows * COLUMNS, dtype=torch.int32).view(rows, COLUMNS)


def _state(member: Member, part: Callable[[int], torch.Tensor]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (member.size,))
    return {
        f"layers.{number}.weight": DTensor.from_local(part(number), mesh, [Shard(0)], run_check=False)
        for number in range(ARRAYS)
    }


def _join(member: Member) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{member.address}:{member.port}", rank=member.rank, world_size=member.size
    )


def _hold(member: Member) -> Mapping[str, Any]:
    method = _Plain(member) if member.contender == PLAIN else _TorchFt(member)
    method.hold({f"layers.{number}.weight": _local(member, number) for number in range(ARRAYS)})
    return {}


def _prepare(member: Member) -> Mapping[str, Any]:
    _join(member)
    method = _METHODS[member.contender](member)
    messages = _count_messages()
    method.save(_state(member, lambda number: _local(member, number)))
    dist.barrier()
    _KEPT.append(method)
    return {"messages": messages}


def _recover(member: Member) -> Mapping[str, Any]:
    """Recover, and measure when each phase has ended, by the clock that all processes of a machine share."""
    first, used = time.monotonic(), [time.process_time()]
    messages = _count_messages()
    _join(member)
    used.append(time.process_time())
    method = _METHODS[member.contender](member)
    method.agree()
    dist.barrier()
    agreed = time.monotonic()
    used.append(time.process_time())
    # Memory of the state is touched, as that of a module that was initialised.
    state = _state(member, lambda number: torch.zeros(member.rows // member.size, COLUMNS, dtype=torch.int32))
    dist.barrier()
    built = time.monotonic()
    used.append(time.process_time())
    transfer = method.load(state)
    loaded = time.monotonic()
    used.append(time.process_time())
    step = state["layers.0.weight"].to_local()[:1].float().sum().reshape(1)
    dist.all_reduce(step)
    stepped = time.monotonic()
    used.append(time.process_time())
    for number in range(ARRAYS):
        assert torch.equal(state[f"layers.{number}.weight"].to_local(), _local(member, number))
    _KEPT.append(method)
    return {
        "marks": [first, agreed, built, loaded, stepped],
        "transfer": transfer,
        "used": used,
        "messages": messages,
        "modules": sorted(sys.modules) if member.rank == 0 else [],
    }


def _train(member: Member) -> Mapping[str, Any]:
    _join(member)
    method = _Ours(member)
    state = _state(member, lambda number: _local(member, number))
    dist.barrier()
    return method.train(state, _STEPS)


_TASKS: Final = {"prepare": _prepare, "hold": _hold, "recover": _recover, "train": _train}
_KEPT: Final[list[object]] = []
"""Objects that live as long as the process."""


def _count_messages() -> dict[str, list[int]]:
    """Count the requests of this process to each memory server, and the bytes of their payloads, from now on."""
    counts: dict[str, list[int]] = {}
    call = ServerConnections.call

    def counted(
        server: ServerConnections, header: Mapping[str, Any], payload: memoryview | bytes = b"", place: Any = None
    ) -> tuple[dict[str, Any], memoryview]:
        answer, data = call(server, header, payload, place)
        count = counts.setdefault(server.place, [0, 0])
        count[0] += 1
        count[1] += len(payload) + (int(header["nbytes"]) if header["op"] == "read" else len(data))
        return answer, data

    ServerConnections.call = counted  # type: ignore[method-assign, assignment]
    return counts


def _run(member: Member) -> None:
    """Run a process until it is killed."""
    torch.set_num_threads(1)
    try:
        result = json.dumps(_TASKS[member.task](member))
    except BaseException:  # noqa: BLE001  # the parent raises it
        result = json.dumps({"error": traceback.format_exc()})
    temporary = member.output.with_suffix(".new")
    temporary.write_text(result, encoding="utf-8")
    temporary.replace(member.output)
    while True:
        signal.pause()


def main() -> None:
    """Fork processes on request."""
    for line in sys.stdin:
        request, argument = json.loads(line)
        if request == "fork":
            if not (answer := os.fork()):
                with contextlib.suppress(SystemExit):  # lm-resiliency ends processes that get SIGTERM
                    _run(Member(**argument))
                os._exit(0)
        elif request == "import":
            for name in argument:
                with contextlib.suppress(ImportError):  # made by the parent of its module
                    importlib.import_module(name)
            installed_plugins()  # imports those of ckptcore
            answer = 0
        else:
            for process in argument:
                os.waitpid(process, 0)
            answer = 0
        print(answer, flush=True)


def request_of(member: Member) -> str:
    """Return the request to fork a process."""
    return json.dumps(["fork", asdict(member)])


if __name__ == "__main__":
    main()
