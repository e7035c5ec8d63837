"""Failures are parsed from the bodies of answers, and from the texts of obstore's errors."""

from __future__ import annotations

import pytest
from ckptcore_obstore.failures import FailureKind, failure_of_response, failure_of_text
from ckptcore_s3.refusals import REFUSALS

NOT_FOUND = (
    "Object at location a not found: Error performing GET http://host/bucket/a in 672.158µs - "
    "Server returned non-2xx status "
    'code: 404 Not Found: <?xml version="1.0" encoding="UTF-8"?>\n'
    "<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"
    '\n\nDebug source:\nNotFound {\n    path: "a",\n    source: '
    "RetryError(\n        kind: Timeout"
)


DNS = "HTTP error: error sending request\n\nDebug source:\n kind: Connect,\n (dns error) failed to lookup address: "


def test_an_error_text_that_contains_the_body_of_an_answer() -> None:
    failure = failure_of_text(NOT_FOUND, REFUSALS)
    assert (failure.kind, failure.status, failure.code) == (FailureKind.MISSING, 404, "NoSuchKey")
    assert failure.description == "404 NoSuchKey: The specified key does not exist."


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Generic S3 error: HTTP error: error sending request\n\nDebug source:\n kind: Timeout,", FailureKind.TIMEOUT),
        (
            "Generic S3 error: HTTP error: error sending request\n\nDebug source:\n kind: Connect,",
            FailureKind.CONNECTION,
        ),
        (f"{DNS}Name or service not known", FailureKind.HOST),
        (f"{DNS}Temporary failure in name resolution", FailureKind.CONNECTION),
        ("Generic S3 error: error decoding response body", FailureKind.CONNECTION),
        (
            "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
            FailureKind.REGION,
        ),
        ("something that nobody has seen", FailureKind.OTHER),
    ],
)
def test_error_texts_without_an_answer(text: str, kind: FailureKind) -> None:
    failure = failure_of_text(text, REFUSALS)
    assert failure.kind is kind
    assert "\n" not in failure.description and "Debug" not in failure.description


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b"", FailureKind.MISSING),
        (403, b"<html>no XML of an error</html>", FailureKind.PERMISSION),
        (500, b"<Error><Code>SlowDown</Code></Error>", FailureKind.THROTTLED),
        (599, b"\xff\x00", FailureKind.SERVER),
        (
            400,
            b"<Error xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Code>NoSuchUpload</Code></Error>",
            FailureKind.NO_UPLOAD,
        ),
        (418, b"<Error><Code>Teapot</Code></Error>", FailureKind.OTHER),
    ],
)
def test_kinds_of_failures_in_answers(status: int, body: bytes, kind: FailureKind) -> None:
    failure = failure_of_response(status, body, REFUSALS)
    assert failure.kind is kind
    assert len(failure_of_response(status, body * 1000, REFUSALS).description) < 1000


def test_the_region_in_an_answer() -> None:
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>"
    assert dict(failure_of_response(400, body, REFUSALS).hints) == {"Region": "eu-west-1"}
    assert dict(failure_of_response(301, b"", REFUSALS, "eu-west-2").hints) == {"Region": "eu-west-2"}
