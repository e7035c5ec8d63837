"""Failures of requests, classified by their remedy."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias
from xml.etree import ElementTree

from ckptcore.redaction import redacted


class FailureKind(enum.Enum):
    """Kind of a failure. The value is the text in errors."""

    MISSING = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    NO_UPLOAD = "the upload does not exist"
    CONDITION = "the condition of the request is not met"
    RANGE = "the object ends before the requested range"
    CREDENTIALS = "the credentials are missing or invalid"
    SETTINGS = "the settings of the client are wrong"
    PERMISSION = "the credentials do not allow it"
    REGION = "the bucket is in another region"
    CLOCK = "the clock of this machine is wrong"
    FULL = "a quota is exceeded"
    THROTTLED = "the service throttles requests"
    SERVER = "the service failed"
    TIMEOUT = "the request timed out"
    CONNECTION = "the connection failed"
    HOST = "the host of the service is unknown"
    DIGEST = "the service requires a digest of each upload"
    RETAINED = "the retention policy of the bucket does not allow it yet"
    ARCHIVED = "the object is in an archive"
    KEY = "the encryption key cannot be used"
    SIZE = "the object is larger than the service allows"
    NAME = "the name of the object is invalid"
    PROXY = "the proxy refused the request"
    UNSUPPORTED = "the service does not support the request"
    OTHER = "the service refused the request"

    @property
    def is_transient(self) -> bool:
        """True if a retry may succeed."""
        return self in _TRANSIENT


_TRANSIENT: Final = frozenset(
    {FailureKind.THROTTLED, FailureKind.SERVER, FailureKind.TIMEOUT, FailureKind.CONNECTION}
)  # fmt: skip

_KINDS_BY_STATUS: Final = {
    301: FailureKind.REGION,
    307: FailureKind.REGION,
    401: FailureKind.CREDENTIALS,
    403: FailureKind.PERMISSION,
    404: FailureKind.MISSING,
    405: FailureKind.UNSUPPORTED,
    407: FailureKind.PROXY,
    408: FailureKind.TIMEOUT,
    409: FailureKind.SERVER,
    412: FailureKind.CONDITION,
    413: FailureKind.SIZE,
    416: FailureKind.RANGE,
    429: FailureKind.THROTTLED,
    501: FailureKind.UNSUPPORTED,
    503: FailureKind.THROTTLED,
    507: FailureKind.FULL,
}

_MAX_MESSAGE_LENGTH: Final = 300
_MAX_BODY_LENGTH: Final = 10_000
"""Maximum lengths of a message in an error, and of the text that is searched for an XML or JSON body."""


class Refusal(NamedTuple):
    """A refusal that a service documents.

    Attributes:
        status: usual HTTP status of the refusal.
        kind: kind of the refusal.
        cause: reason of the refusal; empty for the text of the kind.
        remedy: advice, as a sentence without the full stop; empty for the advice of the kind.
    """

    status: int
    kind: FailureKind
    cause: str = ""
    remedy: str = ""


Refusals: TypeAlias = Mapping[str, Refusal]
"""The refusals of a service, by code. ``KMS.*`` is for all codes that begin with ``KMS.`` and have no entry."""


_K: Final = FailureKind
_BROKEN: Final = "the request was damaged on its way"
_UPLOAD_GONE: Final = "Save again: another save or a lifecycle rule may have aborted the upload"

SHARED_REFUSALS: Final[Mapping[str, Refusal]] = {
    # objects, buckets, uploads
    "NoSuchKey": Refusal(404, _K.MISSING),
    "NoSuchBucket": Refusal(404, _K.NO_BUCKET),
    "InvalidBucketName": Refusal(400, _K.NO_BUCKET, "the name of the bucket is invalid"),
    "NoSuchUpload": Refusal(404, _K.NO_UPLOAD, "", _UPLOAD_GONE),
    "InvalidPart": Refusal(400, _K.NO_UPLOAD, "a part of the upload does not exist", _UPLOAD_GONE),
    "InvalidPartOrder": Refusal(400, _K.OTHER, "the parts of the upload are not in order"),
    "PreconditionFailed": Refusal(412, _K.CONDITION),
    "InvalidRange": Refusal(416, _K.RANGE),
    "InvalidBucketState": Refusal(409, _K.OTHER, "the state of the bucket does not allow it", "Check the bucket"),
    "EntityTooLarge": Refusal(400, _K.SIZE, "", "Save with smaller shards, or with a layout that makes smaller files"),
    "EntityTooSmall": Refusal(
        400, _K.SIZE, "a part is smaller than the service allows", "Raise the option 'part_bytes'"
    ),
    "InvalidURI": Refusal(400, _K.NAME, "", "Use another name"),
    # credentials
    "SignatureDoesNotMatch": Refusal(403, _K.CREDENTIALS),
    "ExpiredToken": Refusal(400, _K.CREDENTIALS, "the credentials have expired"),
    "InvalidToken": Refusal(400, _K.CREDENTIALS),
    "InvalidSecurity": Refusal(403, _K.CREDENTIALS),
    "MissingSecurityHeader": Refusal(400, _K.CREDENTIALS),
    "CredentialsNotSupported": Refusal(400, _K.CREDENTIALS, "the service accepts no credentials for this request"),
    "RequestTimeTooSkewed": Refusal(403, _K.CLOCK),
    # permissions
    "AccessDenied": Refusal(403, _K.PERMISSION),
    # full or busy
    "TooManyRequests": Refusal(429, _K.THROTTLED),
    "ServiceUnavailable": Refusal(503, _K.THROTTLED),
    "InternalError": Refusal(500, _K.SERVER),
    "OperationAborted": Refusal(409, _K.SERVER, "a conflicting operation is running"),
    "RequestTimeout": Refusal(400, _K.TIMEOUT),  # the service did not receive the body in time
    "IncompleteBody": Refusal(400, _K.CONNECTION, _BROKEN),
    "BadDigest": Refusal(400, _K.CONNECTION, _BROKEN),
    # requests that a service does not accept
    "NotImplemented": Refusal(501, _K.UNSUPPORTED),
    "MethodNotAllowed": Refusal(405, _K.UNSUPPORTED),
    "InvalidArgument": Refusal(400, _K.OTHER),
    "BadRequest": Refusal(400, _K.OTHER),
    "MalformedXML": Refusal(400, _K.OTHER),
    "MaxMessageLengthExceeded": Refusal(400, _K.OTHER),
    "MetadataTooLarge": Refusal(400, _K.OTHER),
    "MissingContentLength": Refusal(411, _K.OTHER),
    "MissingRequestBodyError": Refusal(400, _K.OTHER),
    "UnexpectedContent": Refusal(400, _K.OTHER),
}
"""Refusals that several services have in common, with the same code, cause and remedy."""


def refusal_of(code: str, refusals: Refusals) -> Refusal | None:
    """Return the refusal with a code, or None if the service does not document it.

    A reason in JSON can be a code of XML with a small first letter.
    """
    names = (code, code[:1].upper() + code[1:], f"{code.partition('.')[0]}.*")
    return next((refusals[name] for name in names if name in refusals), None)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request.

    Attributes:
        kind: kind of failure, which determines the remedy.
        status: HTTP status; None if there was no response.
        code: error code of the service; may be empty.
        message: message of the service or the connection, in one line.
        hints: further fields of the response by name, such as the right region.
    """

    kind: FailureKind
    status: int | None
    code: str = ""
    message: str = ""
    hints: tuple[tuple[str, str], ...] = ()

    @property
    def description(self) -> str:
        """Status, code and message in one line."""
        status = "" if self.status is None else str(self.status)
        named = " ".join(part for part in (status, self.code) if part)
        return ": ".join(part for part in (named, self.message) if part) or "no reason given"


@dataclass(frozen=True, slots=True)
class Tried:
    """Statistics of the tries of a failed request.

    Attributes:
        tries: number of tries.
        seconds: time from the start of the first try to the last failure.
        may_be_done: True if an earlier try may have succeeded, or may still succeed.
    """

    tries: int = 1
    seconds: float = 0.0
    may_be_done: bool = False


class RequestFailed(Exception):
    """A failed request. Plugins convert it before it reaches users.

    Attributes:
        failure: the last failure.
        tried: statistics of its tries, set by `try_request`.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(redacted(failure.description))
        self.failure = failure
        self.tried = Tried()


def failure_of_response(status: int, body: bytes, refusals: Refusals, region: str = "") -> Failure:
    """Classify a response with an error in XML or JSON.

    `region` is the region of the bucket in the headers of the response; empty if unknown.
    """
    code, message, hints = _read_json(body) or _read_xml(body)
    if region and "Region" not in dict(hints):
        hints = (*hints, ("Region", region))
    kind = _kind(status, code, refusals)
    if status == 400 and _NEEDS_DIGEST.search(message):
        kind = FailureKind.DIGEST
    return Failure(kind, status, code, _one_line(message), hints)


_NEEDS_DIGEST: Final = re.compile(r"content-md5.*\brequired\b|\brequired\b.*content-md5", re.IGNORECASE | re.DOTALL)
"""Matches the message of S3 with the code InvalidRequest: "Content-MD5 OR x-amz-checksum- HTTP
header is required for Put Object requests with Object Lock parameters".
"""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_XML: Final = re.compile(r"<(\w+:)?Error\b.*</(\w+:)?Error>", re.DOTALL)
_JSON: Final = re.compile(r"\{\s*\"error\".*\}", re.DOTALL)
_DELETE_FAILURE: Final = re.compile(r"DeleteObjects request failed for key \S+: (.*) \(code: (\w+)\)", re.DOTALL)
"""Matches obstore's message for one failed object of a request that deletes several objects."""

_DEBUG: Final = re.compile(r"\n+Debug source:.*", re.DOTALL)


def failure_of_text(text: str, refusals: Refusals) -> Failure:
    """Classify the text of an obstore error.

    object_store formats a response as ``... Server returned non-2xx status code: 404 Not Found:
    BODY``. obstore appends a dump of Rust structures. From the dump, this function takes only the
    kind and the cause of a connection error.
    """
    cleaned = _DEBUG.sub("", text)
    status = _STATUS.search(cleaned)
    if status is not None:
        body = _XML.search(cleaned, 0, _MAX_BODY_LENGTH) or _JSON.search(cleaned, 0, _MAX_BODY_LENGTH)
        return failure_of_response(int(status[1]), body[0].encode() if body else b"", refusals)
    if "redirect without LOCATION" in cleaned:  # object_store's text for a bucket in another region
        return Failure(FailureKind.REGION, 301, "", "the service redirects to another region")
    if (failed := _DELETE_FAILURE.search(cleaned)) is not None:
        return Failure(_kind(200, failed[2], refusals), None, failed[2], _one_line(failed[1]))
    kind = FailureKind.OTHER
    if "Wanted range starting at" in cleaned:  # object_store's text for a response that lacks the first byte
        kind = FailureKind.RANGE
    elif "TunnelUnsuccessful" in text or "ProxyAuthRequired" in text:
        kind = FailureKind.PROXY
    elif "kind: Timeout" in text or "operation timed out" in text or "TimedOut" in text:
        kind = FailureKind.TIMEOUT
    elif is_unknown_host(text):
        kind = FailureKind.HOST
    elif re.search(r"kind: (Connect|Request|Interrupted|Decode|Unknown)\b|HTTP error|error (sending|decoding)", text):
        kind = FailureKind.CONNECTION
    causes = re.findall(r"(?:ConnectionRefused|ConnectionReset|dns error|certificate[^\n\"]*|tcp connect error)", text)
    message = _one_line(cleaned)
    if causes:
        message = f"{message} ({', '.join(dict.fromkeys(causes))})"
    return Failure(kind, None, "", message)


def is_unknown_host(text: str) -> bool:
    """Return True if the text of a failed connection says that the name service does not know the host.

    This answer is final. If a name service does not answer, the text is a "temporary failure"
    instead.
    """
    return re.search(r"Name or service not known|nodename nor servname|No such host is known", text) is not None


def _kind(status: int, code: str, refusals: Refusals) -> FailureKind:
    refusal = refusal_of(code, refusals)
    if refusal is not None:
        return refusal.kind
    return _KINDS_BY_STATUS.get(status) or (FailureKind.SERVER if status >= 500 else FailureKind.OTHER)


def _read_json(body: bytes) -> tuple[str, str, tuple[tuple[str, str], ...]] | None:
    """Parse an error in Google's JSON form.

    Return its reason and message, or None for another form.
    """
    if not body.startswith(b"{"):
        return None
    try:
        error = json.loads(body)["error"]
        reasons = [str(entry["reason"]) for entry in error.get("errors") or [] if "reason" in entry]
        reason, message = (reasons or [""])[0], str(error.get("message", ""))
        # The reason "notFound" is the same for objects and buckets. Only the message differs: "The
        # specified bucket does not exist."
        if reason == "notFound" and "specified bucket" in message:
            reason = "NoSuchBucket"
        return reason, message, ()
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _read_xml(body: bytes) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Parse the code, message and hints of an error in XML.

    For a body that is not XML, the message is the start of the body, and the rest is empty.
    """
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return "", body[:_MAX_BODY_LENGTH].decode("utf-8", "replace"), ()
    fields = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    hints = tuple((name, fields[name]) for name in ("Region", "Endpoint", "ServerTime", "Details") if fields.get(name))
    return fields.get("Code", ""), fields.get("Message", ""), hints


def _one_line(text: str) -> str:
    line = redacted(" ".join(text.split()))  # redact before the cut, which could hide the end of a password
    return line if len(line) <= _MAX_MESSAGE_LENGTH else line[: _MAX_MESSAGE_LENGTH - 3] + "..."
