"""Object stores: upload and download of one state, compared with s3fs, gcsfs and plain obstore.

s3fs and gcsfs transfer a safetensors file. Requests are counted at MiniStack. It reads a whole object for each range,
and is slower than any client, so times are measured with small servers in memory (`benchmarks.object_services`).
Server and client share the processors of this machine, so the time of a contender includes that of the server. The
report has the processor time of the client alone.

Plain obstore uploads a state that is bytes already, 16 parts of 8 MiB at once, and reads 16 ranges of 8 MiB at once.
It verifies nothing. The raw limit is what the server sends to bare sockets of 16 threads that discard the bytes.
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np
import obstore
import safetensors.numpy
from ckptcore_s3.testing import S3Server, s3_server
from ckptcore_testing import FaultProxy

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.object_services import ObjectService, gs, s3
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.model import HostArray

_ARRAYS: Final = 32
_AT_ONCE: Final = 16
_PART_BYTES: Final = 8 << 20
_GIBIBYTES: Final = 0.25
"""Size of the state. Servers in Python move it several times in each round."""
_SMALL_ARRAYS: Final = 1000
_LEAST_OF_FSSPEC: Final = 1.5
_LEAST_OF_OBSTORE: Final = 0.9
_MOST_TO_SAVE: Final = 20
_MOST_TO_LOAD: Final = 10

State = dict[str, HostArray]


def rows(setting: Setting) -> Iterator[Row]:
    """Count the requests of a checkpoint, and measure uploads and downloads."""
    with s3_server(setting.directory) as server:
        bucket = server.create_bucket()
        yield from _requests(server, bucket, setting.count(_SMALL_ARRAYS))
    state = _state(_GIBIBYTES * setting.scale)
    for run in (s3, gs):
        with run(setting.directory) as service:
            for cases in (_uploads, _downloads):
                for case in cases(service, state):
                    yield from compare(case, setting.rounds)


def _state(gibibytes: float) -> State:
    side = int((gibibytes * 2**30 / _ARRAYS / 4) ** 0.5)
    random = np.random.default_rng(0)
    return {f"layer.{number:02}": random.random((side, side), np.float32) for number in range(_ARRAYS)}


def _uploads(service: ObjectService, state: State) -> Iterator[Case]:
    context, store = service.context, service.store
    data = safetensors.numpy.save(state)

    def ours(layout: str) -> Contender:
        """Save to an empty location. The server has memory for the state of one round."""
        location = _saved(service, layout)

        def clear() -> None:
            for page in obstore.list(store, f"up/{layout}"):
                obstore.delete(store, [entry["path"] for entry in page])

        save = partial(ckptcore.save, location, state, layout=layout, context=context)
        return Contender(f"ckptcore {layout}", save, clear)

    def other() -> None:
        service.files.pipe_file(f"{service.bucket}/fsspec", safetensors.numpy.save(state))

    def plain() -> None:
        obstore.put(store, "by-hand", data, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_AT_ONCE)

    yield Case(
        f"{service.scheme} uploads",
        [
            ours("safetensors"),
            Contender(f"{service.library} + safetensors", other, target=_LEAST_OF_FSSPEC),
            Contender("plain obstore", plain, target=_LEAST_OF_OBSTORE),
            ours("ocdbt"),
            ours("dcp"),
        ],
        len(data),
    )


def _saved(service: ObjectService, layout: str) -> str:
    return f"{service.scheme}://{service.bucket}/up/{layout}"


def _downloads(service: ObjectService, state: State) -> Iterator[Case]:
    context, store = service.context, service.store
    data = safetensors.numpy.save(state)
    size = len(data)
    obstore.put(store, "by-hand", data, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_AT_ONCE)
    target_bytes, target = np.zeros(size, np.uint8), {name: np.zeros_like(array) for name, array in state.items()}
    ranges = [(start, min(start + _PART_BYTES, size)) for start in range(0, size, _PART_BYTES)]

    def plain(memory: HostArray) -> HostArray:
        def read(part: tuple[int, int]) -> None:
            start, stop = part
            content = obstore.get_range(store, "by-hand", start=start, end=stop)
            memory[start:stop] = np.frombuffer(memoryview(content), np.uint8)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(read, ranges))
        return memory

    def raw() -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(partial(_receive, service.url, f"/{service.bucket}/by-hand"), ranges))

    def ours(layout: str) -> Contender:
        return Contender(f"ckptcore {layout}", lambda: ckptcore.load(_saved(service, layout), context=context))

    def other() -> object:
        return safetensors.numpy.load(service.files.cat_file(f"{service.bucket}/fsspec"))

    yield Case(
        f"{service.scheme} downloads",
        [
            ours("safetensors"),
            Contender(f"{service.library} + safetensors", other, target=_LEAST_OF_FSSPEC),
            Contender("plain obstore", lambda: plain(np.empty(size, np.uint8)), target=_LEAST_OF_OBSTORE),
            ours("ocdbt"),
            ours("dcp"),
            Contender("raw limit of the server", raw),
        ],
        size,
    )
    location = _saved(service, "safetensors")
    yield Case(
        f"{service.scheme} downloads, in place",
        [
            Contender("ckptcore safetensors", lambda: ckptcore.load_into(location, target, context=context)),
            Contender("plain obstore", lambda: plain(target_bytes), target=_LEAST_OF_OBSTORE),
        ],
        size,
    )


def _receive(url: str, path: str, part: tuple[int, int]) -> None:
    """Read bytes of an object from a bare socket and discard them."""
    address = urllib.parse.urlsplit(url)
    request = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nRange: bytes={part[0]}-{part[1] - 1}\r\n\r\n"
    buffer = bytearray(1 << 20)
    with socket.create_connection((address.hostname or "", address.port or 80)) as connection:
        connection.sendall(request.encode("ascii"))
        left = part[1] - part[0]  # headers count too, so the last bytes of the body, as many, stay unread
        while left > 0 and (received := connection.recv_into(buffer, min(left, len(buffer)))):
            left -= received


def _requests(server: S3Server, bucket: str, count: int) -> Iterator[Row]:
    """Count the requests of a checkpoint of many small arrays."""
    small = {f"w{number}": np.full(250, number, np.float32) for number in range(count)}
    with FaultProxy(server.server.url) as proxy:
        context = ckptcore.Context(storage={"s3": {**server.options, "endpoint": proxy.url}})
        for layout in ("safetensors", "ocdbt", "dcp"):
            location = f"s3://{bucket}/small/{layout}"
            for what, most in (("save", _MOST_TO_SAVE), ("load", _MOST_TO_LOAD)):
                proxy.forget()
                if what == "save":
                    ckptcore.save(location, small, layout=layout, context=context)
                else:
                    ckptcore.load(location, context=context)
                requests = len(proxy.log)
                case = f"s3 requests, {what} {count} arrays"
                yield Row(
                    case, f"ckptcore {layout}", requests, "requests", target=f"below {most}", reached=requests < most
                )
