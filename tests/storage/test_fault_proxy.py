"""A proxy forwards bytes unchanged, and applies exactly the given faults to requests."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ckptcore_testing import (
    CutContent,
    DeliverLater,
    Duplicate,
    FaultProxy,
    InterruptAfter,
    InterruptBefore,
    LoseAnswer,
    ProxiedRequest,
    RepeatLater,
    RequestFault,
    RequestsFailing,
    ResetAnswer,
    ResetRequest,
    SeededFaults,
    StaleList,
    StoreDialect,
    Throttle,
    TruncateAnswer,
    Wait,
)
from ckptcore_testing.fault_proxy import PLAIN_HTTP
from ckptcore_testing.http_messages import HTTPAnswer

_SECONDS = 60

_BODY = bytes(range(256)) * 40


class _Store(ThreadingHTTPServer):
    """A server that stores bodies by path, and records every request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.seen: list[tuple[str, str, bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Store

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self._body()
        self.server.seen.append(("PUT", self.path, body))
        created = self.path not in self.server.objects
        if not created and self.headers.get("If-None-Match") == "*":
            self._answer(412, b"there")
            return
        self.server.objects[self.path] = body
        self._answer(201 if created else 200, self.requestline.encode())

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path, b""))
        if self.path == "/list":
            self._answer(200, " ".join(sorted(self.server.objects)).encode())
            return
        if self.path == "/headers":
            self._answer(200, bytes(self.headers))
            return
        if self.path == "/chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"some ", b"chunks"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        if self.path == "/until-it-ends":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"until it ends")
            return
        body = self.server.objects.get(self.path)
        self._answer(404 if body is None else 200, body or b"")

    do_HEAD = do_GET


@pytest.fixture
def store() -> Iterator[_Store]:
    with _Store() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


_LISTS = StoreDialect(lambda request: request.path == "/list", PLAIN_HTTP.throttled)


@contextmanager
def through(store: _Store, *faults: RequestFault) -> Iterator[tuple[FaultProxy, http.client.HTTPConnection]]:
    """Yield a proxy, and a client of it. The first requests get the given faults."""
    plan = RequestsFailing(dict(enumerate(faults)))
    with (
        FaultProxy(f"http://127.0.0.1:{store.server_port}", plan, dialect=_LISTS) as proxy,
        closing(http.client.HTTPConnection("127.0.0.1", int(proxy.url.rpartition(":")[2]), timeout=_SECONDS)) as client,
    ):
        yield proxy, client


def put(client: http.client.HTTPConnection, path: str, body: bytes = _BODY, **headers: str) -> tuple[int, bytes]:
    client.request("PUT", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = client.getresponse()
    return answer.status, answer.read()


def get(client: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, bytes]:
    client.request(method, path)
    answer = client.getresponse()
    return answer.status, answer.read()


# --- without faults


def test_messages_pass_unchanged(store: _Store) -> None:
    with through(store) as (proxy, client):
        assert put(client, "/a%20b?x=1&y") == (201, b"PUT /a%20b?x=1&y HTTP/1.1")
        assert get(client, "/a%20b?x=1&y") == (200, _BODY)
        assert get(client, "/a%20b?x=1&y", "HEAD") == (200, b"")
        assert get(client, "/none") == (404, b"")
        assert get(client, "/chunks") == (200, b"some chunks")
        assert get(client, "/until-it-ends") == (200, b"until it ends")
        _, headers = get(client, "/headers")
        assert f"Host: 127.0.0.1:{client.port}".encode() in headers
    assert [(logged.request.method, logged.status, logged.answered) for logged in proxy.log][:4] == [
        ("PUT", 201, len(b"PUT /a%20b?x=1&y HTTP/1.1")),
        ("GET", 200, len(_BODY)),
        ("HEAD", 200, 0),
        ("GET", 404, 0),
    ]
    first = proxy.log[0].request
    assert (first.path, dict(first.query), first.nbytes) == ("/a%20b", {"x": "1", "y": ""}, len(_BODY))
    assert first.changes and not proxy.log[1].request.changes


def test_a_body_in_chunks_passes(store: _Store) -> None:
    with through(store) as (_, client):
        client.request("PUT", "/a", iter((b"in", b" chunks")), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert client.getresponse().read() == b"PUT /a HTTP/1.1"
    assert store.objects == {"/a": b"in chunks"}


def test_a_client_that_expects_100_continue_gets_it(store: _Store) -> None:
    with (
        through(store) as (proxy, _),
        socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2]))) as raw,
    ):
        raw.settimeout(_SECONDS)
        raw.sendall(b"PUT /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert raw.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"hi")
        assert raw.recv(1000).startswith(b"HTTP/1.1 201")
    assert store.objects == {"/a": b"hi"}


def test_many_connections_at_once(store: _Store) -> None:
    with through(store) as (proxy, _):
        port = int(proxy.url.rpartition(":")[2])

        def use(number: int) -> None:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)) as client:
                for turn in range(5):
                    put(client, f"/{number}/{turn}", _BODY * number)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [logged.request.number for logged in proxy.log] == list(range(40))
    assert {path: len(body) for path, body in store.objects.items()} == {
        f"/{number}/{turn}": len(_BODY) * number for number in range(8) for turn in range(5)
    }


def test_the_connection_breaks_if_the_store_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        client = http.client.HTTPConnection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        with closing(client), pytest.raises(ConnectionError):
            get(client, "/a")
        assert [logged.status for logged in proxy.log] == [None]


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1/path"])
def test_an_invalid_upstream_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as http://host:port"):
        FaultProxy(url)


# --- faults


def test_a_delay_does_not_change_the_answer(store: _Store) -> None:
    with through(store, Wait(0.01)) as (_, client):
        assert put(client, "/a")[0] == 201


def test_a_throttled_request_never_arrives(store: _Store) -> None:
    with through(store, Throttle()) as (_, client):
        assert put(client, "/a")[0] == 503
        assert store.seen == []
        assert put(client, "/a")[0] == 201, "the connection goes on"


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [
        (ResetRequest(0.5), False),
        (ResetRequest(1.0), False),
        (InterruptBefore(lambda: None), False),
        (LoseAnswer(), True),
        (InterruptAfter(lambda: None), True),
        (ResetAnswer(0.0), True),
        (ResetAnswer(0.9), True),
    ],
)
def test_a_reset_breaks_connection_before_or_after_request(fault: RequestFault, arrives: bool, store: _Store) -> None:
    with through(store, fault) as (proxy, client):
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            put(client, "/a", _BODY * 100)
        proxy.settle()
        assert store.objects == ({"/a": _BODY * 100} if arrives else {})
        assert proxy.log[0].faults == (fault,)


def test_actions_run_before_or_after_the_request(store: _Store) -> None:
    seen: list[int] = []
    look: Callable[[], None] = lambda: seen.append(len(store.seen))
    with through(store, InterruptBefore(look), InterruptAfter(look)) as (_, client):
        for _ in range(2):
            with pytest.raises(ConnectionError):
                put(client, "/a")
            client.close()
    assert seen == [0, 1]


def test_a_client_detects_a_truncated_answer(store: _Store) -> None:
    store.objects["/a"] = _BODY
    with through(store, TruncateAnswer(0.5), TruncateAnswer(1.0), TruncateAnswer(0.9)) as (_, client):
        for path, expected in (("/a", len(_BODY) // 2), ("/a", len(_BODY) - 1), ("/chunks", 0)):
            with pytest.raises(http.client.IncompleteRead) as caught:
                get(client, path)
            assert len(caught.value.partial) >= expected, "nothing of it came"
            client.close()


def test_a_client_cannot_detect_cut_content(store: _Store) -> None:
    store.objects["/a"] = _BODY
    with through(store, CutContent(3), CutContent(10**9), CutContent(1)) as (_, client):
        assert get(client, "/a") == (200, _BODY[:-3])
        assert get(client, "/a") == (200, b"")
        assert get(client, "/chunks") == (200, b"some chunks")


def test_a_stale_list_is_the_previous_list(store: _Store) -> None:
    with through(store, StaleList(), Wait(0), StaleList(), Wait(0), StaleList()) as (_, client):
        assert get(client, "/list") == (200, b""), "asked for the first time"
        put(client, "/a")
        assert get(client, "/list") == (200, b"")
        assert get(client, "/list") == (200, b"/a")
        assert get(client, "/none") == (404, b""), "no list"


@pytest.mark.parametrize(("heard", "status"), [("first", 201), ("second", 412)])
def test_a_duplicate_arrives_twice(heard: str, status: int, store: _Store) -> None:
    with through(store, Duplicate(heard)) as (_, client):  # type: ignore[arg-type]
        assert put(client, "/a", If_None_Match="*")[0] == status
    assert [seen[:2] for seen in store.seen] == [("PUT", "/a")] * 2


def test_a_repeated_request_arrives_again_later(store: _Store) -> None:
    with through(store, RepeatLater(2)) as (_, client):
        put(client, "/a", b"old")
        put(client, "/a", b"new")
        assert get(client, "/a") == (200, b"new")
        assert get(client, "/b") == (404, b"")
        assert get(client, "/a") == (200, b"old")


def test_a_late_request_arrives_later_or_at_settle(store: _Store) -> None:
    with through(store, DeliverLater(1)) as (proxy, client):
        with pytest.raises(ConnectionError):
            put(client, "/a", b"late")
        client.close()
        assert store.objects == {}
        get(client, "/a")
        assert get(client, "/a") == (200, b"late")
        proxy.forget()
        proxy.plan = RequestsFailing({0: DeliverLater(1000)})
        with pytest.raises(ConnectionError):
            put(client, "/b", b"at the end")
        proxy.settle()
        assert store.objects["/b"] == b"at the end"


def test_a_late_request_does_not_arrive_after_the_proxy_ends(store: _Store) -> None:
    with through(store, DeliverLater(1000)) as (_, client), pytest.raises(ConnectionError):
        put(client, "/a", b"late")
    assert store.objects == {}


# --- plans


def _requests() -> list[ProxiedRequest]:
    return [
        ProxiedRequest(number, method, f"/bucket/{'0123456789abcdef' if number % 3 else 'key'}-{number % 7}")
        for number, method in enumerate(["GET", "PUT", "DELETE", "HEAD"] * 100)
    ]


def _drawn(seed: int, requests: list[ProxiedRequest], **options: object) -> dict[int, tuple[RequestFault, ...]]:
    plan = SeededFaults(seed, **options)  # type: ignore[arg-type]
    drawn = {request.number: tuple(plan.faults(request, PLAIN_HTTP)) for request in requests}
    return {number: faults for number, faults in drawn.items() if faults}


def test_a_seed_always_draws_the_same_faults() -> None:
    requests = _requests()
    assert _drawn(1, requests) == _drawn(1, requests)
    assert _drawn(1, requests) != _drawn(2, requests)


def test_random_ids_in_paths_do_not_change_the_faults() -> None:
    requests = _requests()
    renamed = [
        ProxiedRequest(request.number, request.method, request.path.replace("0123456789abcdef", "fedcba9876543210"))
        for request in requests
    ]
    assert _drawn(1, requests) == _drawn(1, renamed)


def test_the_number_and_the_kinds_of_faults_are_limited() -> None:
    spared = (Throttle,)
    assert len(_drawn(1, _requests(), rate=1.0, most=7, spared=spared)) == 7
    assert _drawn(1, _requests(), rate=0.0) == {}
    assert not {
        type(fault) for faults in _drawn(1, _requests(), rate=1.0, most=999, spared=spared).values() for fault in faults
    } & {Throttle}


def test_throttling_comes_in_bursts() -> None:
    drawn = _drawn(3, _requests(), rate=0.05, most=999, burst=5)
    throttled = sorted(number for number, faults in drawn.items() if faults == (Throttle(),))
    assert any(second == first + 1 for first, second in itertools.pairwise(throttled))


def test_each_kind_of_fault_is_drawn_only_for_requests_that_it_fits() -> None:
    requests = _requests() + [ProxiedRequest(400 + number, "PUT", f"/body-{number}", nbytes=9) for number in range(200)]
    drawn = _drawn(1, requests, rate=1.0, most=10_000, may_repeat=lambda request: request.method == "PUT")
    by_method: dict[str, set[type]] = {}
    for number, faults in drawn.items():
        by_method.setdefault(requests[number].method, set()).update(map(type, faults))
    assert {CutContent, TruncateAnswer} <= by_method["GET"]
    assert {ResetRequest, Duplicate, RepeatLater, DeliverLater, LoseAnswer} <= by_method["PUT"]
    assert Duplicate in by_method["DELETE"]
    assert not {RepeatLater, DeliverLater} & (by_method["DELETE"] | by_method["GET"])
    lists = StoreDialect(lambda request: True, HTTPAnswer.make(503, "x", "text/plain", b""))
    plan = SeededFaults(1, rate=1.0, most=999)
    assert any(isinstance(fault, StaleList) for request in requests for fault in plan.faults(request, lists))
