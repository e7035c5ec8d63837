"""Credentials: configured ones, or those that botocore finds for the owner of the process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.forks import reset_in_children

from ckptcore.redaction import chainable, redacted
from ckptcore_s3.sessions import open_session, refused_settings

_CACHE_SECONDS: Final = 60.0
"""Time for which credentials are cached. Then botocore is asked again, and refreshes them if needed."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials that sign requests. No field is shown by `repr`.

    Attributes:
        access_key_id: id of the secret key.
        secret_access_key: the secret key.
        token: session token; empty for permanent keys.
    """

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str = field(default="", repr=False)


class CredentialSource(Protocol):
    """A source of credentials. Thread-safe."""

    def get(self) -> Credentials:
        """Return credentials.

        Raises:
            RequestFailed: with kind CREDENTIALS if there are none, or CONNECTION if their service does not answer,
                which may be transient.
        """
        ...

    def renew(self, used: object) -> bool:
        """Look for other credentials, after the service refused the `used` ones. Return True if there are."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCredentials:
    """Fixed credentials."""

    credentials: Credentials

    def get(self) -> Credentials:
        """Return the credentials."""
        return self.credentials

    def renew(self, used: object) -> bool:
        """Return False."""
        return False


class ChainCredentials:
    """Credentials of the AWS credential chain, found and refreshed by botocore.

    The chain covers the environment, profiles, SSO, credential processes, web identity, containers and instances.
    Keys that another program replaces in the environment or in a file have no time of expiry that botocore knows, so
    they are looked for again once the service refuses them.
    """

    def __init__(self, profile: str | None) -> None:
        """Initialise without I/O, and without importing botocore."""
        self._profile = profile
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Discard the credentials.

        Called in a forked child, because the parent may hold the lock.
        """
        self._lock = threading.Lock()
        self._found: Any = None
        self._cached: tuple[datetime, Credentials] | None = None

    def get(self) -> Credentials:
        """Return credentials.

        A call may send requests, for example to the instance metadata service, if no credentials are cached.
        """
        with self._lock:
            return self._get()

    def renew(self, used: object) -> bool:
        """See `CredentialSource`. If another thread has renewed them since, there is nothing to look for."""
        with self._lock:
            if self._cached is None or self._cached[1] == used:
                self._found = self._cached = None
            return self._get() != used

    def _get(self) -> Credentials:
        now = datetime.now(UTC)
        if self._cached is not None and now < self._cached[0]:
            return self._cached[1]
        if self._found is None:
            self._found = self._find()
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001  # botocore's providers raise many types
            raise RequestFailed(_failure_of("cannot refresh the AWS credentials", error)) from chainable(error)
        credentials = Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")
        self._cached = now + timedelta(seconds=_CACHE_SECONDS), credentials
        return credentials

    def _find(self) -> Any:
        with refused_settings():
            session = open_session(self._profile)
        try:
            found = session.get_credentials()
        except Exception as error:  # noqa: BLE001  # botocore's providers raise many types
            raise RequestFailed(_failure_of("cannot find AWS credentials", error)) from chainable(error)
        if found is None:
            message = (
                "there are none in the options, AWS_ACCESS_KEY_ID, the profiles in ~/.aws, web identity, or the "
                "metadata of containers and instances"
            )
            raise RequestFailed(Failure(FailureKind.CREDENTIALS, None, "", message))
        return found


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
