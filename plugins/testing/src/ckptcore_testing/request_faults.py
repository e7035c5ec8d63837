"""What goes wrong with a request between a client and a store, and plans that decide when: by number, or by a seed."""

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

__all__ = [
    "CutContent",
    "DeliverLater",
    "Duplicate",
    "InterruptAfter",
    "InterruptBefore",
    "LoseAnswer",
    "ProxiedRequest",
    "RepeatLater",
    "RequestFault",
    "RequestPlan",
    "RequestsFailing",
    "ResetAnswer",
    "ResetRequest",
    "SeededFaults",
    "StaleList",
    "StoreDialect",
    "Throttle",
    "TruncateAnswer",
    "Wait",
]


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request that a client sent through a `FaultProxy`, known before its body.

    Attributes:
        number: how many came before it, over all connections.
        method: ``GET``, ``PUT``...
        path: without the query, as it was sent.
        query: parameters by name; without a value, empty.
        headers: by name in lower case.
        nbytes: bytes of its body; 0 where it has none, or does not say.
    """

    number: int
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def changes(self) -> bool:
        """Whether it can change what is stored."""
        return self.method not in ("GET", "HEAD")

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" if value else name for name, value in self.query.items())
        return f"{self.number}: {self.method} {self.path}{'?' if query else ''}{query} ({self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class StoreDialect:
    """What a proxy has to know of a service; the testing package of its storage gives it.

    Attributes:
        is_list: whether a request lists keys.
        throttled: what the service answers where it has too much to do.
    """

    is_list: Callable[[ProxiedRequest], bool]
    throttled: HTTPAnswer


@dataclass(frozen=True, slots=True)
class Wait:
    """Latency: nothing happens for so many seconds. The one fault that goes together with another."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Throttle:
    """The service's answer that it has too much to do; the store never hears of the request."""


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """A reset when a part of the request's body (0 to 1) has come; the store never hears of the request."""

    part: float = 0.5


@dataclass(frozen=True, slots=True)
class ResetAnswer:
    """The store does it; a reset when a part of the answer's body (0 to 1) is sent."""

    part: float = 0.5


@dataclass(frozen=True, slots=True)
class TruncateAnswer:
    """The store does it; the connection ends orderly when a part of the body (0 to 1) is sent.

    The Content-Length stays, or the last chunk is missing, so that a client can see that something is missing.
    """

    part: float = 0.5


@dataclass(frozen=True, slots=True)
class CutContent:
    """So many bytes are missing at the end of an answer, and its Content-Length says the shorter length.

    No network does this, since TCP loses nothing silently: it is what a cache or a proxy with a defect does. Only who
    knows how much there must be, or has a checksum, notices. Answers in chunks, or without a body, are passed on whole.
    """

    nbytes: int = 1


@dataclass(frozen=True, slots=True)
class StaleList:
    """A list is answered as the same list was before; where it was not asked before, as it is."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The store gets the request twice, one after the other; the client hears one of the answers."""

    heard: Literal["first", "second"] = "first"


@dataclass(frozen=True, slots=True)
class RepeatLater:
    """The request is answered, and arrives at the store once more when so many others were done after it."""

    requests: int = 5


@dataclass(frozen=True, slots=True)
class DeliverLater:
    """A reset at once, and the request arrives at the store when so many others were done after it."""

    requests: int = 5


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The store does it, and the client sees a reset before the first byte of the answer."""


@dataclass(frozen=True, slots=True)
class InterruptBefore:
    """Call this, and reset; the store never hears of the request."""

    action: Callable[[], object]


@dataclass(frozen=True, slots=True)
class InterruptAfter:
    """The store does it; call this, and reset before the first byte of the answer."""

    action: Callable[[], object]


RequestFault: TypeAlias = (
    Wait | Throttle | ResetRequest | ResetAnswer | TruncateAnswer | CutContent | StaleList | Duplicate | RepeatLater
    | DeliverLater | LoseAnswer | InterruptBefore | InterruptAfter
)  # fmt: skip
"""What goes wrong with a request."""


class RequestPlan(Protocol):
    """Decides what goes wrong. Any thread."""

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """What a request meets: any number of `Wait`, and at most one other fault."""
        ...


class RequestsFailing:
    """Faults by the number of the request; nothing else goes wrong. The plan without any is one of no faults."""

    def __init__(self, faults: Mapping[int, RequestFault] | None = None) -> None:
        """Give a fault to each of these requests, numbered from 0."""
        self._faults = dict(faults or {})

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        found = self._faults.get(request.number)
        return () if found is None else (found,)


_UNIQUE: Final = re.compile(r"[0-9a-f]{8,}")
"""What is another one each time in the name of a request: a save id, the id of a holder, a bucket for a test."""

_OF_ALL: Final = (Wait, Throttle, ResetAnswer, LoseAnswer, DeliverLater, RepeatLater, Duplicate)
_OF_READS: Final = (Wait, Throttle, ResetAnswer, LoseAnswer, TruncateAnswer, CutContent)
_OF_LISTS: Final = (*_OF_READS, StaleList, StaleList)


class SeededFaults:
    """Faults drawn by a seed: the same for the same requests, whatever the order in which threads send them.

    What a request meets depends on the seed, on its method and path (ids that differ from run to run left out), on the
    names of its parameters, and on how often that was asked before. A throttled request begins a burst: some that
    follow are throttled too.
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
        """Draw faults.

        Args:
            seed: the same gives the same.
            rate: which part of the requests meets one, 0 to 1.
            most: after so many there are no more, so that whoever tries again gets through.
            spared: kinds of faults that do not come.
            may_repeat: which requests may arrive at the store later (`RepeatLater`, `DeliverLater`).
            wait_seconds: the longest latency.
            burst: the most requests that are throttled in a row.
            latest: the most requests that are done before one that comes late.
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
