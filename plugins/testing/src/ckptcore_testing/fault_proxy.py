"""A proxy between a client and a store on one machine, that lets happen to requests what networks and services do."""

from __future__ import annotations

import socket
import threading
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from ckptcore_testing.http_messages import ConnectionLost, HTTPAnswer, HTTPHead, HTTPStream
from ckptcore_testing.request_faults import (
    CutContent,
    DeliverLater,
    Duplicate,
    InterruptAfter,
    InterruptBefore,
    LoseAnswer,
    ProxiedRequest,
    RepeatLater,
    RequestFault,
    RequestPlan,
    RequestsFailing,
    ResetAnswer,
    ResetRequest,
    StaleList,
    StoreDialect,
    Throttle,
    TruncateAnswer,
    Wait,
)

__all__ = ["PLAIN_HTTP", "FaultProxy", "LoggedRequest"]

PLAIN_HTTP: Final = StoreDialect(
    is_list=lambda request: False,
    throttled=HTTPAnswer.make(
        503, "Service Unavailable", "text/plain", b"the test lets the service have too much to do"
    ),
)
"""A service that lists nothing."""

_SECONDS: Final = 60.0
"""How long a store may take for an answer, and a thread to end."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request, and what became of it.

    Attributes:
        request: what was asked.
        faults: what it met.
        status: of the answer that the client got, or would have got without the fault; None where there was none.
        answered: bytes of the body of that answer.
    """

    request: ProxiedRequest
    faults: tuple[RequestFault, ...] = ()
    status: int | None = None
    answered: int = 0

    def __str__(self) -> str:
        met = f", met {', '.join(map(str, self.faults))}" if self.faults else ""
        return f"{self.request} -> {self.status} ({self.answered} bytes){met}"


@dataclass(frozen=True, slots=True)
class _Late:
    """A request that arrives at the store when so many were done."""

    due: int
    method: str
    message: bytes


class _Broken(Exception):
    """The connection to the client is to be reset."""


class FaultProxy:
    """A proxy on 127.0.0.1 that passes requests on to one store, over HTTP/1.1 without encryption, and lets them meet faults.

    Each connection of a client has a thread and a connection to the store, and nothing in a message is changed: a
    signature, which covers the host that the client knows, stays true. Bodies are held in memory whole. Use it as a
    context manager.
    """

    def __init__(self, upstream: str, plan: RequestPlan | None = None, *, dialect: StoreDialect = PLAIN_HTTP) -> None:
        """Listen on a free port.

        Args:
            upstream: the URL of the store, ``http://host:port``.
            plan: decides what goes wrong; None: nothing does. It can be changed between requests, as `plan`.
            dialect: how the service says that it is throttled, and what lists there.

        Raises:
            ValueError: if the URL is none such.
        """
        parts = urllib.parse.urlsplit(upstream)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"{upstream!r}: expected http://host:port of a store")
        self._upstream = (parts.hostname, parts.port or 80)
        self.plan: RequestPlan = plan if plan is not None else RequestsFailing()
        self._dialect = dialect
        self._lock = threading.Lock()
        self._number = 0
        self._done = 0
        self._late: list[_Late] = []
        self._lists: dict[str, HTTPAnswer] = {}
        self._log: list[LoggedRequest] = []
        self._connections: set[_Connection] = set()
        self._accepted = 0
        self._has_accepted = threading.Condition(self._lock)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._accepting = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._accepting.start()

    @property
    def url(self) -> str:
        """Where clients find it, ``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def log(self) -> Sequence[LoggedRequest]:
        """The requests that are done, by their numbers."""
        with self._lock:
            return sorted(self._log, key=lambda logged: logged.request.number)

    def forget(self) -> None:
        """Empty the log and number the requests from 0 again. What is to arrive later, and lists that were seen, stay."""
        with self._lock:
            self._log.clear()
            self._number = 0

    def settle(self) -> None:
        """Hang up on every client, and let the store get what is under way or is to arrive later; then nothing more arrives.

        A request that came whole is passed on, as a network does with what a dead client sent. New connections are
        taken afterwards.
        """
        # Connections are accepted in their order: once this one is, so are those of clients that have died since.
        with socket.create_connection(self._listener.getsockname(), _SECONDS) as last, self._lock:
            port = last.getsockname()[1]
            self._has_accepted.wait_for(lambda: self._accepted == port, _SECONDS)
            connections = list(self._connections)
        for connection in connections:
            connection.hang_up()
        for connection in connections:
            connection.join()
        with self._lock:
            late, self._late = self._late, []
        self._deliver(late)

    def close(self) -> None:
        """Hang up and listen no more. What was to arrive later never does."""
        with self._lock:
            self._late.clear()
        self.settle()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(_SECONDS)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- for its connections

    def _accept(self) -> None:
        while True:
            try:
                client, (_, port) = self._listener.accept()
            except OSError:
                return  # it is closed
            connection = _Connection(self, HTTPStream(client), self._dialect)
            with self._lock:
                self._connections.add(connection)
                connection.start()
                self._accepted = port
                self._has_accepted.notify_all()

    def connect(self) -> HTTPStream:
        """A new connection to the store.

        Raises:
            ConnectionLost
        """
        try:
            return HTTPStream(socket.create_connection(self._upstream, _SECONDS))
        except OSError as error:
            raise ConnectionLost(f"the store at {self._upstream} does not answer: {error}") from error

    def take_number(self) -> int:
        """The number of a request that has just come."""
        with self._lock:
            number, self._number = self._number, self._number + 1
        return number

    def arrive_later(self, requests: int, method: str, message: bytes) -> None:
        """Let a request arrive at the store once so many others are done."""
        with self._lock:
            self._late.append(_Late(self._done + 1 + requests, method, message))

    def listed(self, key: str, answer: HTTPAnswer) -> HTTPAnswer:
        """What a list was answered the time before, or now where this is the first time."""
        with self._lock:
            before = self._lists.get(key, answer)
            self._lists[key] = answer
        return before

    def end_request(self, logged: LoggedRequest) -> None:
        """Note what became of a request; what is due by then arrives before its client hears the answer."""
        with self._lock:
            self._log.append(logged)
            self._done += 1
            due = [late for late in self._late if late.due <= self._done]
            self._late = [late for late in self._late if late.due > self._done]
        self._deliver(due)

    def end_connection(self, connection: _Connection) -> None:
        """Forget a connection that is closed."""
        with self._lock:
            self._connections.discard(connection)

    def _deliver(self, late: Sequence[_Late]) -> None:
        for one in late:
            try:
                upstream = self.connect()
            except ConnectionLost:
                return  # the store is gone, and what was to arrive is lost
            try:
                upstream.send(one.message)
                upstream.read_answer(one.method)
            except ConnectionLost:
                continue  # whatever the store makes of it, nobody hears it
            finally:
                upstream.close()


class _Connection:
    """A connection of a client, and the one to the store that goes with it."""

    def __init__(self, proxy: FaultProxy, client: HTTPStream, dialect: StoreDialect) -> None:
        self._proxy = proxy
        self._client = client
        self._dialect = dialect
        self._upstream: HTTPStream | None = None
        self._hung_up = False
        self._thread = threading.Thread(target=self._run, name="fault-proxy-connection", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hang_up(self) -> None:
        self._hung_up = True
        self._client.interrupt()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_SECONDS)

    def _run(self) -> None:
        broken = False
        try:
            while not self._hung_up and (head := self._client.read_head()) is not None and not self._hung_up:
                if not self._serve(head):
                    break
        except (ConnectionLost, _Broken):
            broken = True
        finally:
            (self._client.reset if broken else self._client.close)()
            if self._upstream is not None:
                self._upstream.close()
            self._proxy.end_connection(self)

    def _serve(self, head: HTTPHead) -> bool:
        """Pass one request on; whether the connection goes on."""
        request = _request(head, self._proxy.take_number())
        faults = tuple(self._proxy.plan.faults(request, self._dialect))
        others = [fault for fault in faults if not isinstance(fault, Wait)]
        if len(others) > 1:
            raise ValueError(f"a request meets one fault beside waiting: {others}")
        for fault in faults:
            if isinstance(fault, Wait):
                threading.Event().wait(fault.seconds)
        fault = others[0] if others else Wait(0)
        answer: HTTPAnswer | None = None
        try:
            if (head.field("expect") or "").lower() == "100-continue":
                self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            if isinstance(fault, ResetRequest) and head.length:
                self._client.read(int(head.length * min(max(fault.part, 0.0), 1.0)))
                raise _Broken
            message = head.encoded() + self._client.read_request_body(head)
            answer = self._ask(request, message, fault)
        finally:
            status, nbytes = (None, 0) if answer is None else (answer.status, len(answer.body))
            self._proxy.end_request(LoggedRequest(request, faults, status, nbytes))
        self._tell(answer, fault)
        return not (head.closes or answer.head.closes)

    def _ask(self, request: ProxiedRequest, message: bytes, fault: RequestFault) -> HTTPAnswer:
        """What the store answers, or what stands for it; what is to break before the answer breaks here."""
        match fault:
            case Throttle():
                return self._dialect.throttled
            case ResetRequest():
                raise _Broken
            case InterruptBefore(action):
                action()
                raise _Broken
            case DeliverLater(requests):
                self._proxy.arrive_later(requests, request.method, message)
                raise _Broken
        answer = self._forward(request.method, message)
        if self._dialect.is_list(request):
            before = self._proxy.listed(_list_key(request), answer)
            if isinstance(fault, StaleList):
                return before
        match fault:
            case Duplicate(heard):
                again = self._forward(request.method, message)
                return again if heard == "second" else answer
            case RepeatLater(requests):
                self._proxy.arrive_later(requests, request.method, message)
        return answer

    def _tell(self, answer: HTTPAnswer, fault: RequestFault) -> None:
        """Answer the client, or break as the fault says."""
        head, body = answer.head, memoryview(answer.body)
        match fault:
            case LoseAnswer():
                raise _Broken
            case InterruptAfter(action):
                action()
                raise _Broken
            case ResetAnswer(part):
                self._client.send(head.encoded(), body[: _part(answer, part)])
                raise _Broken
            case TruncateAnswer(part) if body:
                self._client.send(head.encoded(), body[: _part(answer, part)])
                self._hung_up = True  # closed in order, since the loop ends
                return
            case CutContent(nbytes) if body and not head.is_chunked:
                body = body[: max(0, len(body) - nbytes)]
                head = head.having("Content-Length", str(len(body)))
        self._client.send(head.encoded(), body)

    def _forward(self, method: str, message: bytes) -> HTTPAnswer:
        """Ask the store, over the connection that goes with the client's."""
        if self._upstream is not None and self._upstream.has_ended:
            self._upstream.close()
            self._upstream = None
        if self._upstream is None:
            self._upstream = self._proxy.connect()
        self._upstream.send(message)
        answer = self._upstream.read_answer(method)
        if answer.head.closes:
            self._upstream.close()
            self._upstream = None
        return answer


def _part(answer: HTTPAnswer, part: float) -> int:
    """How many bytes of a body are sent: never all of them, nor the chunk that says that it is the last one."""
    nbytes = len(answer.body)
    return min(int(nbytes * min(max(part, 0.0), 1.0)), max(0, nbytes - (5 if answer.head.is_chunked else 1)))


def _list_key(request: ProxiedRequest) -> str:
    """The same for two requests of one list."""
    return f"{request.path}?{sorted(request.query.items())}"


def _request(head: HTTPHead, number: int) -> ProxiedRequest:
    parts = head.first.decode("latin-1").split(" ")
    if len(parts) != 3:
        raise ConnectionLost(f"{head.first[:80]!r} is no request")
    path, _, query = parts[1].partition("?")
    names: list[tuple[str, str]] = urllib.parse.parse_qsl(query, keep_blank_values=True)
    headers = {
        name.strip().decode("latin-1").lower(): value.strip().decode("latin-1")
        for name, _, value in (line.partition(b":") for line in head.fields)
    }
    return ProxiedRequest(number, parts[0], path, dict(names), headers, head.length or 0)
