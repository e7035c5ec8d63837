"""Refusals: errors of the service, with their names in both APIs.

See https://cloud.google.com/storage/docs/json_api/v1/status-codes (``reason``) and
https://cloud.google.com/storage/docs/xml-api/reference-status (``Code``).
"""

from __future__ import annotations


class Refusal(Exception):
    """A refused request.

    Attributes:
        status: HTTP status.
        reason: name in the JSON API.
        code: name in the XML API.
        message: the message.
    """

    def __init__(self, status: int, reason: str, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.code = code
        self.message = message


def condition_not_met() -> Refusal:
    """Return the refusal for a failed precondition."""
    return Refusal(
        412, "conditionNotMet", "PreconditionFailed", "At least one of the pre-conditions you specified did not hold."
    )


def not_modified() -> Refusal:
    """Return the refusal (status 304) of a conditional read of an unchanged object."""
    return Refusal(304, "notModified", "NotModified", "Not Modified")


def no_object(bucket: str, name: str) -> Refusal:
    """Return the refusal for a missing object."""
    return Refusal(404, "notFound", "NoSuchKey", f"No such object: {bucket}/{name}")


def no_bucket(bucket: str) -> Refusal:
    """Return the refusal for a missing bucket."""
    return Refusal(404, "notFound", "NoSuchBucket", f"The specified bucket does not exist: {bucket}")


def no_upload(upload: str) -> Refusal:
    """Return the refusal for a missing upload."""
    return Refusal(404, "notFound", "NoSuchUpload", f"The requested upload was not found: {upload}")


def bucket_conflict(message: str) -> Refusal:
    """Return the refusal for a bucket that exists already, or that is not empty."""
    return Refusal(409, "conflict", "Conflict", message)


def invalid(message: str, code: str = "InvalidArgument") -> Refusal:
    """Return the refusal for an invalid request."""
    return Refusal(400, "invalid", code, message)


def not_implemented(message: str, status: int = 501) -> Refusal:
    """Return the refusal for a request that the service, or this server, does not support."""
    return Refusal(status, "notImplemented", "NotImplemented", message)


def unauthorized() -> Refusal:
    """Return the refusal for a request without the required token."""
    return Refusal(401, "authError", "AuthenticationRequired", "Invalid Credentials")
