"""Redaction: hide passwords, tokens and signatures of URLs in text."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["chainable", "redacted"]

_HIDDEN: Final = "***"

_URL: Final = r"([a-zA-Z][a-zA-Z0-9+.-]*)(:/{1,2})([^\s<>\"]+)"
"""A URL in a text. `pathlib` may have removed one of its slashes. Trailing punctuation may belong to the text."""

_LOCAL: Final = frozenset({"file", "local", "memory"})
"""Schemes whose URLs may contain any character, and have no secrets."""

_PARAMETER: Final = (
    r"(?i)((?:[?&#]|%3F|%26|%23)[\w.-]{0,64}(?:auth|cred|key|passw|secret|sig|token)[\w.-]{0,64}(?:=|%3D))"
    r"(?!\*\*\*)(?:(?!%26)[^&;#/\s'\"])+"
)
"""A query parameter outside a URL, as in an object key, whose name suggests a secret. It may be percent-encoded.
Other parameters are not redacted, because local paths may contain them."""
_TAIL: Final = "')],.;:"
_PORT: Final = r"[^:]*(?::[0-9]*)?\Z"


def redacted(text: str) -> str:
    """Return a text whose URLs have no passwords, and no values in queries and fragments.

    ``https://user:password@host/a?token=value`` becomes ``https://user:***@host/a?token=***``.
    """
    if ":/" in text:
        text = re.sub(_URL, _redacted_url, text)
    if "=" in text or "%3" in text:  # compiling the patterns takes longer than a small save
        text = re.sub(_PARAMETER, rf"\1{_HIDDEN}", text)
    return text


def chainable(error: BaseException) -> BaseException | None:
    """Return an error for ``raise ... from``, or None if it, or an error in its chain, would print a secret.

    Errors of other libraries may contain URLs, which a traceback prints. `CheckpointError` redacts its own text.
    """
    found: BaseException | None = error
    seen: set[int] = set()  # a chain may have cycles
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        for text in (str(found), repr(found), *getattr(found, "__notes__", ())):
            if redacted(text) != text:
                return None
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return error


def _redacted_url(matched: re.Match[str]) -> str:
    scheme, slashes, rest = matched.groups()
    if scheme.lower() in _LOCAL:
        return matched[0]
    stripped = rest.rstrip(_TAIL)
    rest, tail = stripped, rest[len(stripped) :]
    begin = min([index for index in (rest.find("?"), rest.find("#")) if index >= 0], default=len(rest))
    address, query = rest[:begin], rest[begin:]
    if query:
        query = re.sub(r"=[^&;#]*", f"={_HIDDEN}", query) if "=" in query else query[0] + _HIDDEN
    return f"{scheme}{slashes}{_without_password(address, scheme)}{query}{tail}"


def _without_password(address: str, scheme: str) -> str:
    """Return the authority and path of a URL without the password, which may have unescaped slashes."""
    authority = address.partition("/")[0]
    if "@" not in authority and (re.match(_PORT, authority) or "@" not in address):
        return address
    user, _, host = (authority if "@" in authority else address).rpartition("@")
    rest = address[len(authority) :] if "@" in authority else ""
    name, colon, _ = user.partition(":")
    if colon:
        return f"{name}:{_HIDDEN}@{host}{rest}"
    # In web URLs the user name alone may be a token.
    return f"{_HIDDEN if scheme.lower() in ('http', 'https') else name}@{host}{rest}"
