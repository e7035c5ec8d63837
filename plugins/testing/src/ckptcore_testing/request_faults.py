"""Faults that a `FaultProxy` applies to requests, and plans that choose them by request number or from a seed."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

from ckptcore_testing.http_messages import HTTPAnswer


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """The head of a request through a `FaultProxy`.

    Attributes:
        number: the number of earlier requests, of all connections.
        method: ``GET``, ``PUT``...
        path: the path without the query, as sent.
        query: values of the parameters by name; an empty string for a parameter without a value.
        headers: headers by lower-case name.
        nbytes: bytes of the body; 0 if unknown.
    """

    number: int
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def changes(self) -> bool:
        """True if the request can change stored data."""
        return self.method not in ("GET", "HEAD")

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" if value else name for name, value in self.query.items())
        return f"{self.number}: {self.method} {self.path}{'?' if query else ''}{query} ({self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class StoreDialect:
    """Properties of an object store that a `FaultProxy` needs.

    Attributes:
        is_list: returns True if a request lists keys.
        throttled: the answer of the store to throttled requests.
    """

    is_list: Callable[[ProxiedRequest], bool]
    throttled: HTTPAnswer


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait before handling the request. Can be combined with another fault."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Throttle:
    """Answer with `StoreDialect.throttled`, without forwarding the request."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with a refusal.

    Attributes:
        answer: the refusal.
        instead_of: a status. Forward the request, and refuse it only if the answer has this status. None: do not
            forward.
    """

    answer: HTTPAnswer
    instead_of: int | None = None


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Reset the connection after a part (0 to 1) of the request's body, without forwarding the request."""

    part: float = 0.5


@dataclass(frozen=True, slots=True)
class ResetAnswer:
    """Reset the connection after a part (0 to 1) of the answer's body."""

    part: float = 0.5


@dataclass(frozen=True, slots=True)
class TruncateAnswer:
    """Close the connection normally after a part (0 to 1) of the answer's body.

    The Content-Length is not changed, or the last chunk is missing, so that clients can detect this.
    """

    part: float = 0.5


@dataclass(frozen=True, slots=True)
class CutContent:
    """Remove bytes from the end of an answer, and reduce its Content-Length.

    Networks do not do this, but defective caches and proxies do. Clients can detect it only if they know the size or a
    checksum of the object. Chunked answers and answers without a body are not changed.
    """

    nbytes: int = 1


@dataclass(frozen=True, slots=True)
class StaleList:
    """Answer a list request with the previous answer to an equal request, if there is one."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Send the request to the server twice. The client receives the first or the second answer."""

    heard: Literal["first", "second"] = "first"


@dataclass(frozen=True, slots=True)
class RepeatLater:
    """Answer the request, and send it to the server again after some other requests."""

    requests: int = 5


@dataclass(frozen=True, slots=True)
class DeliverLater:
    """Reset the connection, and send the request to the server after some other requests."""

    requests: int = 5


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """Forward the request, and reset the connection before the first byte of the answer."""


@dataclass(frozen=True, slots=True)
class InterruptBefore:
    """Call a function and reset the connection, without forwarding the request."""

    action: Callable[[], object]


@dataclass(frozen=True, slots=True)
class InterruptAfter:
    """Forward the request, call a function, and reset the connection before the first byte of the answer."""

    action: Callable[[], object]


RequestFault: TypeAlias = (
    Wait | Throttle | Refuse | ResetRequest | ResetAnswer | TruncateAnswer | CutContent | StaleList | Duplicate
    | RepeatLater | DeliverLater | LoseAnswer | InterruptBefore | InterruptAfter
)  # fmt: skip
"""A fault of a request."""


class RequestPlan(Protocol):
    """Chooses the faults of requests. Thread-safe."""

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """Return the faults of a request: any number of `Wait`, and at most one fault of another kind."""
        ...


class RequestsFailing:
    """A plan that chooses faults by the number of the request. By default there are none."""

    def __init__(self, faults: Mapping[int, RequestFault] | None = None) -> None:
        """Set the faults by number of the request, counted from 0."""
        self._faults = dict(faults or {})

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        fault = self._faults.get(request.number)
        return () if fault is None else (fault,)


class Refusing:
    """A plan that refuses requests like a service with other policies, keys or features.

    Attributes:
        refusal: returns the refusal of a request, or None. It can be changed between requests.
    """

    def __init__(self, refusal: Callable[[ProxiedRequest], HTTPAnswer | Refuse | None]) -> None:
        """Set the refusals."""
        self.refusal = refusal

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        refusal = self.refusal(request)
        return () if refusal is None else (refusal if isinstance(refusal, Refuse) else Refuse(refusal),)


_UNIQUE: Final = re.compile(r"[0-9a-f]{8,}")
"""Random parts of request paths: save ids, lease ids, names of test buckets."""

_OF_ALL: Final = (Wait, Throttle, ResetAnswer, LoseAnswer, DeliverLater, RepeatLater, Duplicate)
_OF_READS: Final = (Wait, Throttle, ResetAnswer, LoseAnswer, TruncateAnswer, CutContent)
_OF_LISTS: Final = (*_OF_READS, StaleList, StaleList)


class SeededFaults:
    """A plan with random but reproducible faults.

    The faults of a request depend on the seed, its method, its path without random ids, the names of its parameters,
    and the number of earlier equal requests. The order in which threads send different requests matters only for the
    limit `most` and for bursts: after a throttled request, the next requests of any kind may be throttled, too.
    """

    def __init__(
        self,
        seed: int,
        *,
        rate: float = 0.1,
        most: int = 20,
        spared: Collection[type[RequestFault]] = (),
        may_repeat: Callable[[ProxiedRequest], bool] = lambda request: True,
        wait_seconds: float = 0.02,
        burst: int = 4,
        latest: int = 12,
    ) -> None:
        """Create a plan.

        Args:
            seed: seed of the random numbers.
            rate: fraction of requests with a fault, 0 to 1.
            most: maximum number of faults, so that retries succeed eventually. A burst counts as one.
            spared: kinds of faults to leave out.
            may_repeat: returns True if `RepeatLater` and `DeliverLater` are allowed for a request.
            wait_seconds: maximum wait.
            burst: maximum number of throttled requests in a row.
            latest: maximum `requests` of `RepeatLater` and `DeliverLater`.
        """
        self._seed = seed
        self._rate = rate
        self._left = most
        self._spared = frozenset(spared)
        self._may_repeat = may_repeat
        self._wait_seconds = wait_seconds
        self._burst = burst
        self._latest = latest
        self._throttled = 0
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        name = f"{request.method} {_UNIQUE.sub('*', urllib.parse.unquote(request.path))}?{sorted(request.query)}"
        with self._lock:
            if self._throttled:
                self._throttled -= 1
                return (Throttle(),)
            self._asked[name] += 1
            identity = f"{self._seed} {self._asked[name]} {name}"
            draw = random.Random(hashlib.sha256(identity.encode("utf-8", "surrogateescape")).digest())
            if not self._left or draw.random() >= self._rate:
                return ()
            kinds = _OF_ALL if request.changes else _OF_LISTS if dialect.is_list(request) else _OF_READS
            if request.nbytes:
                kinds = (*kinds, ResetRequest)
            possible = [kind for kind in kinds if kind not in self._spared]
            if not self._may_repeat(request):
                possible = [kind for kind in possible if kind not in (RepeatLater, DeliverLater)]
            if not possible:
                return ()
            self._left -= 1
            fault = self._draw(draw, draw.choice(possible))
            if isinstance(fault, Throttle):
                self._throttled = draw.randrange(self._burst)
        return (fault,)

    def _draw(self, draw: random.Random, kind: type[RequestFault]) -> RequestFault:
        makers: Mapping[type[RequestFault], Callable[[], RequestFault]] = {
            Wait: lambda: Wait(draw.random() * self._wait_seconds),
            Throttle: Throttle,
            ResetRequest: lambda: ResetRequest(draw.random()),
            ResetAnswer: lambda: ResetAnswer(draw.random()),
            TruncateAnswer: lambda: TruncateAnswer(draw.random()),
            CutContent: lambda: CutContent(draw.choice((1, 2, 17, 1000))),
            StaleList: StaleList,
            Duplicate: lambda: Duplicate(draw.choice(("first", "second"))),
            RepeatLater: lambda: RepeatLater(draw.randint(0, self._latest)),
            DeliverLater: lambda: DeliverLater(draw.randint(0, self._latest)),
            LoseAnswer: LoseAnswer,
        }
        return makers[kind]()
