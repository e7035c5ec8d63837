"""Object stores: upload and download of one state beside s3fs and gcsfs with safetensors, and beside obstore used by hand.

Requests are counted at MiniStack. It reads all of an object for each range of it, and is slower than any client: what is timed goes to
small servers in memory (`benchmarks.object_services`). Server and client run on this machine and take their part of the same processors, so the seconds of a
contender are those of both sides; the seconds of processor that the client alone took stand beside them. Contenders run in turn.

obstore by hand gets what costs nothing: a gigabyte that is bytes already. It uploads 16 parts of 8 MiB at once, and reads 16 ranges of
8 MiB at once; nothing is checked. Who loads needs memory, which costs more than any copy: what is loaded anew stands beside ranges
that are read into new memory, and `load_into` beside ranges that are read into memory which is there. Memory is touched and given
back before each run (`benchmarks.alternating.touch`). The raw limit is what the server sends to a bare socket for each of 16 threads
that let the bytes go.
"""

from __future__ import annotations

import socket
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import obstore
import safetensors.numpy
from ckptcore_s3.testing import S3Server, s3_server

import ckptcore
from benchmarks.alternating import Contender, Outcome, compare
from benchmarks.object_services import ObjectService, gs, s3
from ckptcore.model import HostArray
from ckptcore.testing import FaultProxy

__all__ = ["rows"]

_ARRAYS: Final = 32
_AT_ONCE: Final = 16
_PART_BYTES: Final = 8 << 20
_ROUNDS: Final = 3
_BY_HAND: Final = "obstore by hand"
_LEAST_OF_FSSPEC: Final = 1.5
_LEAST_OF_OBSTORE: Final = 0.9
_MOST_TO_SAVE: Final = 20
_MOST_TO_LOAD: Final = 10

State = dict[str, HostArray]


def rows(scratch: Path, gigabytes: float) -> Iterator[tuple[str, bool]]:
    """Rows to print, and whether each reached its target."""
    directory = scratch / "object_stores"
    directory.mkdir(parents=True)
    state = _state(gigabytes)
    with s3_server(directory) as server:
        bucket = server.create_bucket()
        yield from _requests(server, bucket)
    for run in (s3, gs):
        with run(directory) as service:
            for transfer in (_uploads, _downloads):
                clock = _Clock()
                contenders = transfer(service, state, clock)
                outcomes = compare(contenders, rounds=_ROUNDS, memory=int(gigabytes * 2**30))
                what = f"{service.scheme} {transfer.__name__.removeprefix('_')}"
                yield from _lines(what, outcomes, clock, gigabytes)


def _state(gigabytes: float) -> State:
    side = int((gigabytes * 2**30 / _ARRAYS / 4) ** 0.5)
    random = np.random.default_rng(0)
    return {f"layer.{number:02}": random.random((side, side), np.float32) for number in range(_ARRAYS)}


class _Clock:
    """Seconds of processor of this process, by contender."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Contender:
        """A contender whose seconds are noted."""

        def noted() -> object:
            start = time.process_time()
            kept = run()
            self.seconds.setdefault(name, []).append(time.process_time() - start)
            return kept

        return Contender(name, noted, prepare)


def _uploads(service: ObjectService, state: State, clock: _Clock) -> Sequence[Contender]:
    context, store = service.context, service.store
    data = safetensors.numpy.save(state)

    def ours(layout: str) -> Contender:
        """A save to a location that is empty: objects are in the memory of the server, and the state of one round is enough there."""
        location = _saved(service, layout)

        def clear() -> None:
            for page in obstore.list(store, f"up/{layout}"):
                obstore.delete(store, [found["path"] for found in page])

        save = partial(ckptcore.save, location, state, layout=layout, context=context)
        return clock.timed(f"ckptcore {layout}", save, clear)

    def other() -> None:
        service.files.pipe_file(f"{service.bucket}/fsspec", safetensors.numpy.save(state))

    def by_hand() -> None:
        obstore.put(store, "by-hand", data, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_AT_ONCE)

    return (
        clock.timed(f"{service.library} + safetensors", other),
        ours("safetensors"),
        clock.timed(_BY_HAND, by_hand),
        ours("ocdbt"),
        ours("dcp"),
    )


def _saved(service: ObjectService, layout: str) -> str:
    return f"{service.scheme}://{service.bucket}/up/{layout}"


def _downloads(service: ObjectService, state: State, clock: _Clock) -> Sequence[Contender]:
    context, store = service.context, service.store
    size = obstore.head(store, "by-hand")["size"]
    there, target = np.zeros(size, np.uint8), {name: np.zeros_like(array) for name, array in state.items()}
    ranges = [(start, min(start + _PART_BYTES, size)) for start in range(0, size, _PART_BYTES)]

    def by_hand(memory: HostArray) -> HostArray:
        def read(part: tuple[int, int]) -> None:
            start, stop = part
            found = obstore.get_range(store, "by-hand", start=start, end=stop)
            memory[start:stop] = np.frombuffer(memoryview(found), np.uint8)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(read, ranges))
        return memory

    def raw() -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(partial(_receive, service.url, f"/{service.bucket}/by-hand"), ranges))

    def ours(layout: str) -> object:
        return ckptcore.load(_saved(service, layout), context=context)

    def other() -> object:
        return safetensors.numpy.load(service.files.cat_file(f"{service.bucket}/fsspec"))

    return (
        clock.timed(f"{service.library} + safetensors", other),
        clock.timed("ckptcore safetensors", partial(ours, "safetensors")),
        clock.timed(_BY_HAND, lambda: by_hand(np.empty(size, np.uint8))),
        clock.timed(
            "ckptcore safetensors, in place",
            lambda: ckptcore.load_into(_saved(service, "safetensors"), target, context=context),
        ),
        clock.timed(f"{_BY_HAND}, in place", lambda: by_hand(there)),
        clock.timed("ckptcore ocdbt", partial(ours, "ocdbt")),
        clock.timed("ckptcore dcp", partial(ours, "dcp")),
        clock.timed("raw limit of the server", raw),
    )


def _receive(url: str, path: str, part: tuple[int, int]) -> None:
    """Let bytes of an object come by a bare socket, and go."""
    address = urllib.parse.urlsplit(url)
    request = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nRange: bytes={part[0]}-{part[1] - 1}\r\n\r\n"
    buffer = bytearray(1 << 20)
    with socket.create_connection((address.hostname or "", address.port or 80)) as connection:
        connection.sendall(request.encode("ascii"))
        left = part[1] - part[0]  # and the headers, which stay unread
        while left > 0 and (found := connection.recv_into(buffer, min(left, len(buffer)))):
            left -= found


def _lines(what: str, outcomes: Sequence[Outcome], clock: _Clock, gigabytes: float) -> Iterator[tuple[str, bool]]:
    by_name = {outcome.name: outcome for outcome in outcomes}
    for outcome in outcomes:
        cpu = statistics.median(clock.seconds[outcome.name][-_ROUNDS:])
        hand = by_name[f"{_BY_HAND}, in place" if outcome.name.endswith(", in place") else _BY_HAND]
        to_hand = statistics.median([other / own for other, own in zip(hand.seconds, outcome.seconds, strict=True)])
        verdict, ok = "", True
        if outcome.name.startswith("ckptcore safetensors"):
            ok = outcome.ratio >= _LEAST_OF_FSSPEC and to_hand >= _LEAST_OF_OBSTORE
            verdict = f"{_LEAST_OF_FSSPEC} and {_LEAST_OF_OBSTORE} {'reached' if ok else 'MISSED'}"
        line = f"{f'object stores: {what}':42} {outcome.name:36} {gigabytes / outcome.median:5.2f} GiB/s {outcome.ratio:7.2f}  "
        yield f"{line}{to_hand:.2f} of obstore, client {cpu:.1f} s of processor  {verdict}", ok


def _requests(server: S3Server, bucket: str) -> Iterator[tuple[str, bool]]:
    """How many requests a checkpoint of a thousand small arrays takes."""
    small = {f"w{number}": np.full(250, number, np.float32) for number in range(1000)}
    with FaultProxy(server.server.url) as proxy:
        context = ckptcore.Context(storage={"s3": {**server.options, "endpoint": proxy.url}})
        for layout in ("safetensors", "ocdbt", "dcp"):
            location = f"s3://{bucket}/small/{layout}"
            proxy.forget()
            ckptcore.save(location, small, layout=layout, context=context)
            saved = len(proxy.log)
            proxy.forget()
            ckptcore.load(location, context=context)
            loaded = len(proxy.log)
            ok = saved < _MOST_TO_SAVE and loaded < _MOST_TO_LOAD
            verdict = f"< {_MOST_TO_SAVE}, < {_MOST_TO_LOAD} {'reached' if ok else 'MISSED'}"
            yield (
                f"{'object stores: requests of 1000 arrays':42} {layout:36} {saved:4} to save, {loaded} to load  {verdict}",
                ok,
            )
