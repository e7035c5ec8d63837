"""Refusals: the errors of the service, with their names in both APIs.

The names are those of https://cloud.google.com/storage/docs/json_api/v1/status-codes (``reason``) and
https://cloud.google.com/storage/docs/xml-api/reference-status (``Code``).
"""

from __future__ import annotations

__all__ = [
    "Refusal",
    "bucket_conflict",
    "condition_not_met",
    "invalid",
    "no_bucket",
    "no_object",
    "no_upload",
    "not_implemented",
    "not_modified",
    "unauthorized",
]


class Refusal(Exception):
    """A request that is not done.

    Attributes:
        status: of HTTP.
        reason: the name in the JSON API.
        code: the name in the XML API.
        message: for people.
    """

    def __init__(self, status: int, reason: str, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.code = code
        self.message = message


def condition_not_met() -> Refusal:
    """A precondition does not hold."""
    return Refusal(
        412, "conditionNotMet", "PreconditionFailed", "At least one of the pre-conditions you specified did not hold."
    )


def not_modified() -> Refusal:
    """A read that was asked for only if the object is another one."""
    return Refusal(304, "notModified", "NotModified", "Not Modified")


def no_object(bucket: str, name: str) -> Refusal:
    """There is no such object."""
    return Refusal(404, "notFound", "NoSuchKey", f"No such object: {bucket}/{name}")


def no_bucket(bucket: str) -> Refusal:
    """There is no such bucket."""
    return Refusal(404, "notFound", "NoSuchBucket", f"The specified bucket does not exist: {bucket}")


def no_upload(upload: str) -> Refusal:
    """There is no such unfinished upload."""
    return Refusal(404, "notFound", "NoSuchUpload", f"The requested upload was not found: {upload}")


def bucket_conflict(message: str) -> Refusal:
    """A bucket that is there already, or that is not empty."""
    return Refusal(409, "conflict", "Conflict", message)


def invalid(message: str, code: str = "InvalidArgument") -> Refusal:
    """A request that makes no sense."""
    return Refusal(400, "invalid", code, message)


def not_implemented(message: str, status: int = 501) -> Refusal:
    """A request that the service, or this fake, does not know."""
    return Refusal(status, "notImplemented", "NotImplemented", message)


def unauthorized() -> Refusal:
    """A request without the token that is asked for."""
    return Refusal(401, "authError", "AuthenticationRequired", "Invalid Credentials")
