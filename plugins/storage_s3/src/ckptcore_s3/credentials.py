"""Credentials: configured credentials, or credentials that botocore finds for the user of the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.services import LibraryCredentials

from ckptcore.redaction import chainable, redacted
from ckptcore_s3.sessions import open_session, refused_settings

_CACHE_SECONDS: Final = 60.0
"""Time for which credentials are cached.

After that, they are requested from botocore again, which refreshes them if needed.
"""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials to sign requests. `repr` shows no field.

    Attributes:
        access_key_id: id of the secret key.
        secret_access_key: the secret key.
        token: session token; empty for permanent keys.
    """

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str = field(default="", repr=False)


class ChainCredentials(LibraryCredentials[Credentials]):
    """Credentials of the AWS credential chain, found and refreshed by botocore.

    The chain covers the environment, profiles, SSO, credential processes, web identity, containers
    and instances. botocore does not know when keys in the environment or in a file expire, because
    another program replaces them. Such keys are read again after the service refuses them.
    """

    def __init__(self, profile: str | None) -> None:
        """Initialise without I/O, and without importing botocore."""
        super().__init__()
        self._profile = profile
        self._expires = datetime.min.replace(tzinfo=UTC)

    def find(self) -> Credentials:
        """See `LibraryCredentials`. May send requests, for example to the instance metadata service."""
        now = datetime.now(UTC)
        if self.last is not None and now < self._expires:
            return self.last
        if self.library is None:
            self.library = self._load()
        try:
            frozen = self.library.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001  # botocore's providers raise many types
            raise RequestFailed(_failure_of("cannot refresh the AWS credentials", error)) from chainable(error)
        self.last = Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")
        self._expires = now + timedelta(seconds=_CACHE_SECONDS)
        return self.last

    def _load(self) -> Any:
        with refused_settings():
            session = open_session(self._profile)
        try:
            credentials = session.get_credentials()
        except Exception as error:  # noqa: BLE001  # botocore's providers raise many types
            raise RequestFailed(_failure_of("cannot find AWS credentials", error)) from chainable(error)
        if credentials is None:
            message = (
                "there are none in the options, AWS_ACCESS_KEY_ID, the profiles in ~/.aws, web identity, or the "
                "metadata of containers and instances"
            )
            raise RequestFailed(Failure(FailureKind.CREDENTIALS, None, "", message))
        return credentials


def _failure_of(what: str, error: Exception) -> Failure:
    """Convert an error of botocore's providers."""
    from botocore.exceptions import HTTPClientError  # type: ignore[import-untyped]  # it has no annotations

    message = f"{what}: {redacted(' '.join(str(error).split()))[:300] or type(error).__name__}"
    kind = FailureKind.CONNECTION if isinstance(error, HTTPClientError) else FailureKind.CREDENTIALS
    return Failure(kind, None, "", message)


def environment_credentials(environment: Mapping[str, str]) -> Credentials | None:
    """Return credentials from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or None."""
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    return Credentials(key, secret, environment.get("AWS_SESSION_TOKEN", ""))
