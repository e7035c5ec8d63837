"""Failures of requests: what a service answered, told apart by what has to be done about it."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

from ckptcore.redaction import redacted

__all__ = ["Failure", "FailureKind", "RequestFailed", "Tried", "failure_of_answer", "failure_of_text"]


class FailureKind(enum.Enum):
    """What kind of failure a request met."""

    MISSING = "the object is not there"
    NO_BUCKET = "the bucket is not there"
    NO_UPLOAD = "the upload in parts is not there"
    CONDITION = "the condition of the request does not hold"
    RANGE = "the object ends before the range that was asked for"
    CREDENTIALS = "the credentials are missing or not known"
    PERMISSION = "the credentials do not allow it"
    REGION = "the bucket is in another region"
    CLOCK = "the clock of this machine is wrong"
    FULL = "a quota is used up"
    THROTTLED = "the service asks to come slower"
    SERVER = "the service failed"
    TIMEOUT = "no answer came in time"
    CONNECTION = "the connection failed"
    UNSUPPORTED = "the service cannot do this"
    OTHER = "the service refused"

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self in _PASSING


_PASSING: Final = frozenset(
    {FailureKind.THROTTLED, FailureKind.SERVER, FailureKind.TIMEOUT, FailureKind.CONNECTION}
)  # fmt: skip

_KINDS_BY_CODE: Final = {
    # https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
    # https://cloud.google.com/storage/docs/xml-api/reference-status
    "NoSuchKey": FailureKind.MISSING,
    "NoSuchVersion": FailureKind.MISSING,
    "NoSuchBucket": FailureKind.NO_BUCKET,
    "NoSuchUpload": FailureKind.NO_UPLOAD,
    "PreconditionFailed": FailureKind.CONDITION,
    "InvalidRange": FailureKind.RANGE,
    "InvalidAccessKeyId": FailureKind.CREDENTIALS,
    "SignatureDoesNotMatch": FailureKind.CREDENTIALS,
    "ExpiredToken": FailureKind.CREDENTIALS,
    "InvalidToken": FailureKind.CREDENTIALS,
    "TokenRefreshRequired": FailureKind.CREDENTIALS,
    "InvalidSecurity": FailureKind.CREDENTIALS,
    "MissingSecurityHeader": FailureKind.CREDENTIALS,
    "AuthenticationRequired": FailureKind.CREDENTIALS,
    "AccessDenied": FailureKind.PERMISSION,
    "AllAccessDisabled": FailureKind.PERMISSION,
    "AccountProblem": FailureKind.PERMISSION,
    "UserProjectAccessDenied": FailureKind.PERMISSION,
    "AuthorizationHeaderMalformed": FailureKind.REGION,
    "PermanentRedirect": FailureKind.REGION,
    "TemporaryRedirect": FailureKind.REGION,
    "IllegalLocationConstraintException": FailureKind.REGION,
    "RequestTimeTooSkewed": FailureKind.CLOCK,
    "RequestExpired": FailureKind.CLOCK,
    "QuotaExceeded": FailureKind.FULL,
    "InsufficientQuota": FailureKind.FULL,
    "XMinioStorageFull": FailureKind.FULL,
    "SlowDown": FailureKind.THROTTLED,
    "Throttling": FailureKind.THROTTLED,
    "ThrottlingException": FailureKind.THROTTLED,
    "RequestLimitExceeded": FailureKind.THROTTLED,
    "TooManyRequests": FailureKind.THROTTLED,
    "BandwidthLimitExceeded": FailureKind.THROTTLED,
    "RequestTimeout": FailureKind.TIMEOUT,  # the service did not get the body in time
    "InternalError": FailureKind.SERVER,
    "ServiceUnavailable": FailureKind.THROTTLED,
    "OperationAborted": FailureKind.SERVER,
    "ConditionalRequestConflict": FailureKind.SERVER,  # two conditional requests at once: to be tried again
    "IncompleteBody": FailureKind.CONNECTION,
    "BadDigest": FailureKind.CONNECTION,
    "NotImplemented": FailureKind.UNSUPPORTED,
    "MethodNotAllowed": FailureKind.UNSUPPORTED,
}

_KINDS_BY_REASON: Final = {
    # https://cloud.google.com/storage/docs/json_api/v1/status-codes
    "conditionNotMet": FailureKind.CONDITION,
    "authError": FailureKind.CREDENTIALS,
    "required": FailureKind.CREDENTIALS,
    "forbidden": FailureKind.PERMISSION,
    "insufficientPermissions": FailureKind.PERMISSION,
    "rateLimitExceeded": FailureKind.THROTTLED,
    "userRateLimitExceeded": FailureKind.THROTTLED,
    "quotaExceeded": FailureKind.THROTTLED,
    "backendError": FailureKind.SERVER,
    "internalError": FailureKind.SERVER,
    "notImplemented": FailureKind.UNSUPPORTED,
}

_KINDS_BY_STATUS: Final = {
    301: FailureKind.REGION,
    307: FailureKind.REGION,
    401: FailureKind.CREDENTIALS,
    403: FailureKind.PERMISSION,
    404: FailureKind.MISSING,
    405: FailureKind.UNSUPPORTED,
    408: FailureKind.TIMEOUT,
    409: FailureKind.SERVER,
    412: FailureKind.CONDITION,
    416: FailureKind.RANGE,
    429: FailureKind.THROTTLED,
    501: FailureKind.UNSUPPORTED,
    503: FailureKind.THROTTLED,
    507: FailureKind.FULL,
}

_MOST_TOLD: Final = 300
"""Characters of a service's own words that go into an error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed.

    Attributes:
        kind: what has to be done about it.
        status: of the answer; None where none came.
        code: by which the service names it; empty where it gave none.
        message: the service's words, or those of the connection, in one line.
        hints: what the service added, such as the right region, by name.
    """

    kind: FailureKind
    status: int | None
    code: str = ""
    message: str = ""
    hints: tuple[tuple[str, str], ...] = ()

    @property
    def told(self) -> str:
        """What was found, in one line."""
        status = "" if self.status is None else str(self.status)
        named = " ".join(part for part in (status, self.code) if part)
        return ": ".join(part for part in (named, self.message) if part) or "no reason was given"


@dataclass(frozen=True, slots=True)
class Tried:
    """What was done about a request that was given up.

    Attributes:
        tries: how often it was sent.
        seconds: from the first try to the end.
        may_be_done: whether a try before the last one failed so that the service may have done it, or may do it yet.
    """

    tries: int = 1
    seconds: float = 0.0
    may_be_done: bool = False


class RequestFailed(Exception):
    """A request that failed; inside the plugins only.

    Attributes:
        failure: why.
        tried: what was done about it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(redacted(failure.told))
        self.failure = failure
        self.tried = Tried()


def failure_of_answer(status: int, body: bytes, region: str = "") -> Failure:
    """The failure that an answer with such a status and body, XML or JSON, tells, and the region that it names in a header."""
    code, message, hints = _read_json(body) or _read_xml(body)
    if region and "Region" not in dict(hints):
        hints = (*hints, ("Region", region))
    return Failure(_kind(status, code), status, code, _one_line(message), hints)


_STATUS: Final = re.compile(r"status code: (\d{3})")
_XML: Final = re.compile(r"<(\w+:)?Error\b.*</(\w+:)?Error>", re.DOTALL)
_JSON: Final = re.compile(r"\{\s*\"error\".*\}", re.DOTALL)
_OF_A_KEY: Final = re.compile(r"DeleteObjects request failed for key \S+: (.*) \(code: (\w+)\)", re.DOTALL)
"""One of several objects that one request was to delete."""

_DEBUG: Final = re.compile(r"\n+Debug source:.*", re.DOTALL)


def failure_of_text(text: str) -> Failure:
    """The failure that the text of an obstore error tells.

    object_store words an answer as ``... Server returned non-2xx status code: 404 Not Found: BODY``; obstore adds a dump of
    Rust structures, which is cut off here but for the kind of what happened to a connection.
    """
    told = _DEBUG.sub("", text)
    status = _STATUS.search(told)
    if status is not None:
        body = _XML.search(told) or _JSON.search(told)
        return failure_of_answer(int(status[1]), body[0].encode() if body else b"")
    if "redirect without LOCATION" in told:  # object_store's words for a bucket in another region
        return Failure(FailureKind.REGION, 301, "", "the service redirects elsewhere")
    if (one := _OF_A_KEY.search(told)) is not None:
        return Failure(_kind(200, one[2]), None, one[2], _one_line(one[1]))
    kind = FailureKind.OTHER
    if "kind: Timeout" in text or "operation timed out" in text or "TimedOut" in text:
        kind = FailureKind.TIMEOUT
    elif re.search(r"kind: (Connect|Request|Interrupted|Decode|Unknown)\b|HTTP error|error (sending|decoding)", text):
        kind = FailureKind.CONNECTION
    causes = re.findall(r"(?:ConnectionRefused|ConnectionReset|dns error|certificate[^\n\"]*|tcp connect error)", text)
    message = _one_line(told)
    if causes:
        message = f"{message} ({', '.join(dict.fromkeys(causes))})"
    return Failure(kind, None, "", message)


def _kind(status: int, code: str) -> FailureKind:
    kind = _KINDS_BY_CODE.get(code) or _KINDS_BY_REASON.get(code)
    if kind is None:
        kind = _KINDS_BY_STATUS.get(status)
    if kind is None:
        kind = FailureKind.SERVER if status >= 500 else FailureKind.OTHER
    return kind


def _read_json(body: bytes) -> tuple[str, str, tuple[tuple[str, str], ...]] | None:
    """The reason and message of an error in JSON as Google words it; None where the body is none."""
    if not body.startswith(b"{"):
        return None
    try:
        error = json.loads(body)["error"]
        reasons = [str(found["reason"]) for found in error.get("errors") or [] if "reason" in found]
        reason, message = (reasons or [""])[0], str(error.get("message", ""))
        # One reason for whatever is missing; the words tell which: "The specified bucket does not exist."
        if reason == "notFound" and "specified bucket" in message:
            reason = "NoSuchBucket"
        return reason, message, ()
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _read_xml(body: bytes) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The code, message and hints of an error in XML; empty where the body is none."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return "", body[:_MOST_TOLD].decode("utf-8", "replace"), ()
    found = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    hints = tuple((name, found[name]) for name in ("Region", "Endpoint", "ServerTime", "Details") if found.get(name))
    return found.get("Code", ""), found.get("Message", ""), hints


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TOLD else line[: _MOST_TOLD - 3] + "..."
