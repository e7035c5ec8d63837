"""ServerEngine: an engine behind an HTTP server. The errors of its requests say if a request had an effect."""

from __future__ import annotations

import http.client
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from ckptcore.redaction import redacted_location
from ckptcore_integrations.engines import Engine, EngineError, EngineRefusedError

_MAX_ANSWER_BYTES: Final = 256 << 20
"""Limit of an answer. Checksums of a large model take some megabytes."""

_SHOWN_CHARACTERS: Final = 500
_NO_EFFECT: Final = frozenset({401, 403, 404, 405, 422})
"""Statuses of requests that a server refuses before it does anything: no permission, no such route, invalid content."""


class ServerEngine(Engine):
    """An engine behind an HTTP server, to which it sends JSON.

    Each request has a connection of its own; redirects and proxies are not followed.

    Attributes:
        name: the address of the server, without a slash at the end.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout: float) -> None:
        """Check the address. Connects at the first request.

        Args:
            url: such as ``http://localhost:30000``.
            api_key: sent as a bearer token; None: no token.
            timeout: the maximum time without a byte of the answer, in seconds.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        if not isinstance(url, str) or not isinstance(api_key, str | None):
            raise TypeError(f"url={redacted_location(str(url))!r}: expected the address and api_key= as text")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(
                "url: expected the address of a server, such as http://localhost:30000, found "
                f"{redacted_location(url)!r}"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"url: {parts.hostname}: a URL must not contain a password; pass api_key=")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: expected printable characters of ASCII; remove line breaks")
        self.name = url.rstrip("/")
        self._timeout = seconds_of("timeout", timeout)
        self._is_secure = parts.scheme == "https"
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _get(self, path: str) -> Mapping[str, Any]:
        """Return the answer to a question. See `_post`."""
        return self._request("GET", path, None)

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Send a request, and return the answer, which must be a JSON object.

        Args:
            path: the path, with a query if it has one.
            body: a JSON object; None: no content.

        Raises:
            EngineRefusedError: the server was not reached, or refused the request.
            EngineError: the server failed or did not answer in time, so that the request may have had an effect.
        """
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        name = f"{method} {self.name}{path}"
        try:
            try:
                connection.connect()
            except OSError as error:
                raise EngineRefusedError(f"{name}: the server cannot be reached: {error}") from error
            try:
                content = None if body is None else json.dumps(body).encode()
                connection.request(method, self._prefix + path, content, self._headers)
                response = connection.getresponse()
                answer = response.read(_MAX_ANSWER_BYTES + 1)
            except TimeoutError as error:
                raise EngineError(f"{name}: no answer for {self._timeout:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{name}: the connection failed: {error!r}") from error
        finally:
            connection.close()
        return _parsed(name, response.status, answer)

    def _text(self, answer: Mapping[str, Any], key: str) -> str:
        """Return the text that an answer has under a key.

        Raises:
            EngineError: the answer has no such text.
        """
        value = answer.get(key)
        if not isinstance(value, str):
            raise EngineError(
                f"{self.name}: expected an answer with the text {key}, found {key}={value!r}: check its version"
            )
        return value


def _parsed(name: str, status: int, answer: bytes) -> Mapping[str, Any]:
    """Return the JSON object of an answer.

    Raises:
        EngineError: the status is that of an error, or the answer is no JSON object.
    """
    shown = answer[:_SHOWN_CHARACTERS].decode(errors="replace")
    if status != http.client.OK:
        kind = EngineRefusedError if status in _NO_EFFECT else EngineError
        raise kind(f"{name}: status {status}: {shown}")
    if len(answer) > _MAX_ANSWER_BYTES:
        raise EngineError(f"{name}: the answer has more than {_MAX_ANSWER_BYTES} bytes")
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{name}: expected JSON, found {shown!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{name}: expected a JSON object, found {shown!r}")
    return value


def seconds_of(name: str, value: object) -> float:
    """Return the value of an argument in seconds.

    Raises:
        TypeError, ValueError: it is not a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={repr(value)[:200]}: expected a number of seconds, as a float or an int")
    try:
        seconds = float(value)
    except OverflowError:  # Python refuses to print the largest ints
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name}={seconds:g}: expected a finite number of seconds above 0")
    return seconds
