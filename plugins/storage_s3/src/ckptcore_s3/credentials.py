"""Credentials: configured ones, or those found by the AWS credential chain."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from ckptcore_obstore.forks import reset_in_children

from ckptcore.errors import StorageCredentialsError
from ckptcore.redaction import chainable, redacted

__all__ = ["ChainCredentials", "CredentialSource", "Credentials", "FixedCredentials", "environment_credentials"]

_CACHE_SECONDS: Final = 60.0
"""Time for which credentials are cached. Then boto3 is asked again, and refreshes them if needed."""


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
        """Return valid credentials.

        Raises:
            StorageCredentialsError: if there are none.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedCredentials:
    """Fixed credentials."""

    credentials: Credentials

    def get(self) -> Credentials:
        """Return the credentials."""
        return self.credentials


class ChainCredentials:
    """Credentials of the AWS credential chain, found and refreshed by boto3.

    The chain covers profiles, SSO, credential processes, web identity, containers and instances.
    """

    def __init__(self, profile: str | None) -> None:
        """Initialise without I/O, and without importing boto3."""
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
        """Return valid credentials.

        A call may send requests, for example to the instance metadata service, if no credentials
        are cached.
        """
        with self._lock:
            now = datetime.now(UTC)
            if self._cached is not None and now < self._cached[0]:
                return self._cached[1]
            if self._found is None:
                self._found = self._find()
            try:
                frozen = self._found.get_frozen_credentials()
            except Exception as error:  # noqa: BLE001  # botocore's providers raise many types
                raise StorageCredentialsError(
                    "cannot refresh the AWS credentials: "
                    f"{redacted(' '.join(str(error).split()))[:300]}. Sign in again, or check the source "
                    "of the profile"
                ) from chainable(error)
            credentials = Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")
            self._cached = now + timedelta(seconds=_CACHE_SECONDS), credentials
            return credentials

    def _find(self) -> Any:
        import boto3  # type: ignore[import-untyped]  # it has no annotations
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

        try:
            found = boto3.Session(profile_name=self._profile).get_credentials()
        except BotoCoreError as error:
            raise StorageCredentialsError(
                f"cannot find AWS credentials: {redacted(' '.join(str(error).split()))[:300]}. Check the "
                "environment variables AWS_..., ~/.aws/config, and the option 'profile'"
            ) from chainable(error)
        if found is None:
            raise StorageCredentialsError(
                "cannot find AWS credentials in the options, AWS_ACCESS_KEY_ID, the profiles "
                "in ~/.aws, web identity, or the metadata of containers and instances. Set "
                "one of them, or Context(storage={'s3': {'anonymous': True}}) for a public "
                "bucket"
            )
        return found


def environment_credentials(environment: Mapping[str, str]) -> Credentials | None:
    """Return credentials from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or None."""
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    return Credentials(key, secret, environment.get("AWS_SESSION_TOKEN", ""))
