"""A proxy between a client and a local server that injects faults of networks and services."""

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
    Refuse,
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

PLAIN_HTTP: Final = StoreDialect(
    is_list=lambda request: False,
    throttled=HTTPAnswer.make(503, "Service Unavailable", "text/plain", b"the test throttles this request"),
)
"""A service without list requests."""

_SECONDS: Final = 60.0
"""Timeout in seconds for connecting to, sending to and receiving from the server, and for joining threads."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request and its result.

    Attributes:
        request: the request.
        faults: the injected faults.
        status: status of the answer, even if a fault then shortened the answer or kept it from the client. None if
            there was no answer, for example because the proxy did not forward the request.
        answered: size of the answer's body in bytes, before a fault shortened it. 0 if there was no answer.
    """

    request: ProxiedRequest
    faults: tuple[RequestFault, ...] = ()
    status: int | None = None
    answered: int = 0

    def __str__(self) -> str:
        faults = f", faults {', '.join(map(str, self.faults))}" if self.faults else ""
        return f"{self.request} -> {self.status} ({self.answered} bytes){faults}"


@dataclass(frozen=True, slots=True)
class _DelayedRequest:
    """A request that is sent to the server when the number of finished requests reaches `due`."""

    due: int
    method: str
    message: bytes


class _ResetClient(Exception):
    """The connection to the client must be reset."""


class FaultProxy:
    """A proxy on 127.0.0.1 that forwards requests to one server, over plain HTTP/1.1, and injects faults.

    Each client connection has a thread and a connection to the server. Messages are not changed, so that signatures,
    which cover the host name, remain valid. Bodies are kept in memory. Use the proxy as a context manager.
    """

    def __init__(self, upstream: str, plan: RequestPlan | None = None, *, dialect: StoreDialect = PLAIN_HTTP) -> None:
        """Listen on a free port.

        Args:
            upstream: the URL of the server, ``http://host:port``.
            plan: decides about faults. None: no faults. The attribute `plan` can be changed between requests.
            dialect: properties of the service: its list requests, and its answer to a throttled request.

        Raises:
            ValueError: for an invalid URL.
        """
        parts = urllib.parse.urlsplit(upstream)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"{upstream!r}: expected a URL such as http://host:port")
        self._upstream = (parts.hostname, parts.port or 80)
        self.plan: RequestPlan = plan if plan is not None else RequestsFailing()
        self._dialect = dialect
        self._lock = threading.Lock()
        self._number = 0
        self._done = 0
        self._late: list[_DelayedRequest] = []
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
        """The URL of the proxy, ``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def log(self) -> Sequence[LoggedRequest]:
        """The finished requests since the last `forget`, sorted by number."""
        with self._lock:
            return sorted(self._log, key=lambda logged: logged.request.number)

    def forget(self) -> None:
        """Clear the log and number requests from 0 again. Delayed requests and cached lists are kept."""
        with self._lock:
            self._log.clear()
            self._number = 0

    def settle(self) -> None:
        """Close all client connections, and forward the requests that are complete or delayed.

        A complete request of a client that has exited is forwarded, as on a real network. New connections are accepted
        afterwards.
        """
        # Connections are accepted in order: when this one is accepted, no earlier connection of a client is pending.
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
        """Close all connections and stop listening. Delayed requests are dropped."""
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

    # --- for connections

    def _accept(self) -> None:
        while True:
            try:
                client, (_, port) = self._listener.accept()
            except OSError:
                return  # the proxy was closed
            connection = _Connection(self, HTTPStream(client), self._dialect)
            with self._lock:
                self._connections.add(connection)
                connection.start()
                self._accepted = port
                self._has_accepted.notify_all()

    def connect(self) -> HTTPStream:
        """Open a connection to the server.

        Raises:
            ConnectionLost: if that fails.
        """
        try:
            return HTTPStream(socket.create_connection(self._upstream, _SECONDS))
        except OSError as error:
            raise ConnectionLost(f"the server at {self._upstream} does not answer: {error}") from error

    def take_number(self) -> int:
        """Return the number of a new request."""
        with self._lock:
            number, self._number = self._number, self._number + 1
        return number

    def arrive_later(self, requests: int, method: str, message: bytes) -> None:
        """Send a request to the server after the current request and `requests` other ones have finished."""
        with self._lock:
            self._late.append(_DelayedRequest(self._done + 1 + requests, method, message))

    def listed(self, key: str, answer: HTTPAnswer) -> HTTPAnswer:
        """Store the answer to a list request. Return the previous answer for the same key, or this one if none."""
        with self._lock:
            before = self._lists.get(key, answer)
            self._lists[key] = answer
        return before

    def end_request(self, logged: LoggedRequest) -> None:
        """Log a request, and send delayed requests that are due, before the client receives its answer."""
        with self._lock:
            self._log.append(logged)
            self._done += 1
            due = [late for late in self._late if late.due <= self._done]
            self._late = [late for late in self._late if late.due > self._done]
        self._deliver(due)

    def end_connection(self, connection: _Connection) -> None:
        """Remove a closed connection."""
        with self._lock:
            self._connections.discard(connection)

    def _deliver(self, requests: Sequence[_DelayedRequest]) -> None:
        for request in requests:
            try:
                upstream = self.connect()
            except ConnectionLost:
                return  # the server has stopped, so delayed requests are lost
            try:
                upstream.send(request.message)
                upstream.read_answer(request.method)
            except ConnectionLost:
                continue  # the answer is not needed
            finally:
                upstream.close()


class _Connection:
    """A client connection with its connection to the server."""

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
        except (ConnectionLost, _ResetClient):
            broken = True
        finally:
            (self._client.reset if broken else self._client.close)()
            if self._upstream is not None:
                self._upstream.close()
            self._proxy.end_connection(self)

    def _serve(self, head: HTTPHead) -> bool:
        """Handle one request. Return True to keep the connection open."""
        request = _request(head, self._proxy.take_number())
        faults = tuple(self._proxy.plan.faults(request, self._dialect))
        others = [fault for fault in faults if not isinstance(fault, Wait)]
        if len(others) > 1:
            raise ValueError(f"a request can have one fault in addition to Wait: {others}")
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
                raise _ResetClient
            message = head.encoded() + self._client.read_request_body(head)
            answer = self._ask(request, message, fault)
        finally:
            status, nbytes = (None, 0) if answer is None else (answer.status, len(answer.body))
            self._proxy.end_request(LoggedRequest(request, faults, status, nbytes))
        self._tell(answer, fault)
        return not (head.closes or answer.head.closes)

    def _ask(self, request: ProxiedRequest, message: bytes, fault: RequestFault) -> HTTPAnswer:
        """Return the answer of the server, or a substitute. Apply faults that occur before the answer."""
        match fault:
            case Throttle():
                return self._dialect.throttled.to(request.method)
            case Refuse(refusal, None):
                return refusal.to(request.method)
            case ResetRequest():
                raise _ResetClient
            case InterruptBefore(action):
                action()
                raise _ResetClient
            case DeliverLater(requests):
                self._proxy.arrive_later(requests, request.method, message)
                raise _ResetClient
        answer = self._forward(request.method, message)
        if self._dialect.is_list(request):
            before = self._proxy.listed(_list_key(request), answer)
            if isinstance(fault, StaleList):
                return before
        match fault:
            case Refuse(refusal, status) if answer.status == status:
                return refusal.to(request.method)
            case Duplicate(heard):
                again = self._forward(request.method, message)
                return again if heard == "second" else answer
            case RepeatLater(requests):
                self._proxy.arrive_later(requests, request.method, message)
        return answer

    def _tell(self, answer: HTTPAnswer, fault: RequestFault) -> None:
        """Send the answer to the client, with the fault."""
        head, body = answer.head, memoryview(answer.body)
        match fault:
            case LoseAnswer():
                raise _ResetClient
            case InterruptAfter(action):
                action()
                raise _ResetClient
            case ResetAnswer(part):
                self._client.send(head.encoded(), body[: _part(answer, part)])
                raise _ResetClient
            case TruncateAnswer(part) if body:
                self._client.send(head.encoded(), body[: _part(answer, part)])
                self._hung_up = True  # ends the loop, which closes the connection normally
                return
            case CutContent(nbytes) if body and not head.is_chunked:
                body = body[: max(0, len(body) - nbytes)]
                head = head.having("Content-Length", str(len(body)))
        self._client.send(head.encoded(), body)

    def _forward(self, method: str, message: bytes) -> HTTPAnswer:
        """Send a request to the server, and return the answer."""
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
    """Return how many bytes of a body to send for a fraction `part`: never all, and no final chunk of size 0."""
    nbytes = len(answer.body)
    return min(int(nbytes * min(max(part, 0.0), 1.0)), max(0, nbytes - (5 if answer.head.is_chunked else 1)))


def _list_key(request: ProxiedRequest) -> str:
    """Return a key that is equal for equal list requests."""
    return f"{request.path}?{sorted(request.query.items())}"


def _request(head: HTTPHead, number: int) -> ProxiedRequest:
    parts = head.first.decode("latin-1").split(" ")
    if len(parts) != 3:
        raise ConnectionLost(f"{head.first[:80]!r} is not a request line")
    path, _, query = parts[1].partition("?")
    names: list[tuple[str, str]] = urllib.parse.parse_qsl(query, keep_blank_values=True)
    headers = {
        name.strip().decode("latin-1").lower(): value.strip().decode("latin-1")
        for name, _, value in (line.partition(b":") for line in head.fields)
    }
    return ProxiedRequest(number, parts[0], path, dict(names), headers, head.length or 0)
