"""Redaction: hide passwords, tokens and signatures of URLs in text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

from ckptcore.records import NamedTuple

__all__ = ["chainable", "redacted", "redacted_location"]

_HIDDEN: Final = "***"

_WORD: Final = r"[^\s<>\"]+(?: [^\s<>\"?&#:/=＝%]+[=＝%][^\s<>\"]*)*"
"""A part of a text that may be a URL. The names of its parameters may have spaces, if a library decoded them."""

_MARKS: Final = ("//", ":/", "=", "%", "\\")
_ESCAPES: Final = r"(?:%[0-9a-fA-F]{2})+|(?:%|\\)u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\/"
_ROUNDS: Final = 8
"""Maximum number of times that a text is decoded. Libraries may encode a URL that is encoded already."""

_SCHEME: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-"
_SCHEME_CHARACTERS: Final = 32
"""Maximum length of a scheme. Limits the search for its beginning, so that redaction takes linear time."""

_LOCAL: Final = frozenset({"file", "local", "memory"})
"""Schemes whose URLs may contain any character, and have no secrets."""

_WITH_LOGIN: Final = frozenset({"abfs", "abfss", "ftp", "ftps", "hdfs", "scp", "sftp", "smb", "ssh", "wasb", "wasbs"})
"""Schemes in which the user part of a URL without a password is a name. In other URLs it may be a token."""

_SECRET_WORDS: Final = frozenset(
    {
        "access", "assertion", "auth", "bearer", "cred", "creds", "jwt", "key", "oauth", "pass", "pwd", "sas",
        "session", "sig",
    }
)  # fmt: skip
"""Words in lower case. The value of a parameter may be secret if its name contains such a word."""

_SECRET_NAME: Final = (
    r"token|secret|password|passwd|passphrase|credential|signature|authorization|sessionid"
    r"|(?:access|account|api|auth|private|session|shared|signing)key"
)
"""Pattern of texts in lower case. A parameter may be secret if its name, without punctuation, contains such a text.

Outside queries and fragments of URLs, parameters with other names are shown, because names of directories may contain
such parameters."""

_NAME_WORDS: Final = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"
"""Pattern of the words in a name. Punctuation, digits and changes of case separate words."""

_TAIL: Final = "')],.;:"
"""Punctuation after a URL, which may belong to the text around it."""

_HOST_AND_PORT: Final = r"[^:]*(?::[0-9]*)?\Z"


def redacted(text: str) -> str:
    """Return a text whose URLs have no passwords, no values in queries and fragments, and no secret path parameters.

    ``https://user:password@host/a?token=value`` becomes ``https://user:***@host/a?token=***``. URLs and names are
    decoded before they are checked, even if they are encoded several times. A part that is encoded too often is hidden
    as a whole. Takes time linear in the length of the text.
    """
    if text.isascii() and not any(mark in text for mark in _MARKS):
        return text  # compiling the patterns takes longer than a small save
    return re.sub(_WORD, lambda word: _redacted_word(word[0]), text)


def redacted_location(text: str) -> str:
    """Return a path or URL without its secrets, as `redacted` does.

    `redacted` cannot find the end of a URL that contains spaces, quotes or angle brackets. Here the whole text is one
    path or URL.
    """
    if text.isascii() and not any(mark in text for mark in _MARKS):
        return text
    return _redacted_word(text)


def chainable(error: BaseException) -> BaseException | None:
    """Return an error for ``raise ... from``, or None if the error, or an error in its chain, would print a secret.

    Errors of other libraries may contain URLs, which a traceback prints. `CheckpointError` redacts its own text.
    """
    errors: list[BaseException] = [error]
    seen: set[int] = set()  # a chain may have cycles
    while errors:
        current = errors.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for text in (str(current), repr(current), *getattr(current, "__notes__", ())):
            if redacted(text) != text:
                return None
        linked = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        errors += [] if linked is None else [linked]
        errors += current.exceptions if isinstance(current, BaseExceptionGroup) else []
    return error


class _Decoded(NamedTuple):
    """A decoded word.

    Attributes:
        text: the word without percent-encoding, escapes and compatibility characters.
        starts, stops: the range of each character in the original word.
    """

    text: str
    starts: list[int]
    stops: list[int]


def _redacted_word(word: str) -> str:
    decoded = _decoded(word)
    if decoded is None:
        return _HIDDEN
    parts, shown = [], 0
    for first, stop in sorted(_secrets(decoded)):
        start, end = decoded.starts[first], decoded.stops[stop - 1]
        if end > shown:
            # A range that overlaps the range before it extends that range, and needs no second mark.
            parts += [word[shown:start], "" if start < shown else _HIDDEN]
            shown = end
    return "".join([*parts, word[shown:]])


def _decoded(word: str) -> _Decoded | None:
    """Decode a word until it no longer changes; None if it still changes after many rounds."""
    decoded = _Decoded(word, list(range(len(word))), list(range(1, len(word) + 1)))
    if word.isascii() and "%" not in word and "\\" not in word:
        return decoded
    for _ in range(_ROUNDS):
        following = _decoded_once(decoded)
        if following.text == decoded.text:
            return decoded
        decoded = following
    return None


def _decoded_once(decoded: _Decoded) -> _Decoded:
    text, starts, stops = decoded
    characters: list[str] = []
    origins: list[tuple[int, int]] = []

    def add(part: str, first: int, stop: int) -> None:
        characters.extend(part)
        origins.extend([(starts[first], stops[stop - 1])] * len(part))

    position = 0
    for escape in [*re.finditer(_ESCAPES, text), None]:
        end = len(text) if escape is None else escape.start()
        for index in range(position, end):
            character = text[index]
            add(character if character.isascii() else _compatible(character), index, index + 1)
        if escape is None:
            break
        position = escape.end()
        if escape[0][0] == "%" and escape[0][1] != "u":
            for character, first, stop in _characters(bytes.fromhex(escape[0].replace("%", ""))):
                add(character, end + 3 * first, end + 3 * stop)
        else:
            add("/" if escape[0][1] == "/" else chr(int(f"0x{escape[0][2:]}", 0)), end, position)
    return _Decoded("".join(characters), [start for start, _ in origins], [stop for _, stop in origins])


def _characters(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the characters of UTF-8, and the ranges of their bytes. Accepts overlong and invalid sequences.

    Other lenient decoders do so, too: they read C0 BD as ``=``.
    """
    position = 0
    while position < len(data):
        lead = data[position]
        length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        following = data[position + 1 : position + length]
        value = lead
        if length > 1 and len(following) == length - 1 and all(byte >> 6 == 0b10 for byte in following):
            value = lead & (0x7F >> length)
            for byte in following:
                value = value << 6 | byte & 0x3F
        else:
            length = 1
        yield chr(min(value, 0x10FFFF)), position, position + length
        position += length


def _secrets(decoded: _Decoded) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a decoded word that must be hidden."""
    text = decoded.text
    stop = len(text.rstrip(_TAIL))
    address = _first_address(text, stop)
    start = stop if address is None else address[0]
    for first, end in _named_secrets(text, _parts(text, 0, start)):
        yield from _range(first, _value_stop(decoded, first, end))
    if address is None:
        return
    query = min([index for index in (text.find("?", start, stop), text.find("#", start, stop)) if index >= 0] or [stop])
    is_encoded = query < stop and decoded.stops[query] - decoded.starts[query] > 1  # in the name of an object
    yield from _users(text, *address, stop if is_encoded else query)
    for first, end in _named_secrets(text, _parts(text, start, query)):  # parameters of the path, after semicolons
        yield from _range(first, end)
    for first, end in _parts(text, query, stop):
        equals = text.find("=", first, end)
        has_value = equals >= 0 and text[equals:end].strip("=")  # a value in Base64 may end with =
        value = equals + 1 if has_value else first
        yield from _range(value, _value_stop(decoded, value, end) if is_encoded else end)


def _range(first: int, stop: int) -> Iterator[tuple[int, int]]:
    if first < stop:
        yield first, stop


def _parts(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of parameters: each begins after one of the characters ``?&#;``, and ends before the next."""
    begins = [mark.start() for mark in re.compile(r"[?&#;]").finditer(text, start, stop)]
    for begin, end in itertools.pairwise([*begins, stop]):
        yield begin + 1, end


def _named_secrets(text: str, parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the values of parameters whose names suggest secrets."""
    for first, stop in parts:
        equals = text.find("=", first, stop)
        if equals >= 0 and _is_secret(text[first:equals]):
            yield equals + 1, stop


def _value_stop(decoded: _Decoded, first: int, stop: int) -> int:
    """Return the end of a value in the name of an object: a slash or quote. An encoded slash belongs to the value."""
    for end in re.compile(r"[/']").finditer(decoded.text, first, stop):
        if decoded.stops[end.start()] - decoded.starts[end.start()] == 1:
            return end.start()
    return stop


def _compatible(text: str) -> str:
    """Return a text in which full-width characters, ligatures and the like are replaced by plain characters."""
    import unicodedata  # few texts need it

    return unicodedata.normalize("NFKD", text)


def _is_secret(name: str) -> bool:
    if name.startswith(" "):
        return False  # ordinary text after a semicolon
    name = _compatible(name)
    plain = "".join([character for character in name.casefold() if character.isalnum()])
    words = [word.lower() for word in re.findall(_NAME_WORDS, name)]
    return re.search(_SECRET_NAME, plain) is not None or not _SECRET_WORDS.isdisjoint([plain, *words])


def _first_address(text: str, stop: int) -> tuple[int, str] | None:
    """Find the first URL that may have secrets. Return the index after its slashes, and its scheme."""
    return next(_addresses(text, 0, stop), None)


def _addresses(text: str, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yield the index after the slashes of each URL, and its scheme. `pathlib` may have removed one of the slashes."""
    for slashes in re.compile(r"(:?)//?").finditer(text, start, stop):
        if not slashes[1]:
            if len(slashes[0]) == 2 and (slashes.start() == 0 or not text[slashes.start() - 1].isalnum()):
                yield slashes.end(), ""  # a URL without its scheme
            continue
        before = text[max(0, slashes.start() - _SCHEME_CHARACTERS) : slashes.start()]
        name = before[len(before.rstrip(_SCHEME)) :].lstrip("0123456789+.-").lower()
        if len(name) > 1 and name not in _LOCAL:  # not the drive of a path
            yield slashes.end(), name


def _users(text: str, begin: int, scheme: str, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of passwords and tokens in the URLs from `begin` on. Passwords may have unescaped slashes."""
    last = text.rfind("@", begin, stop)
    following: tuple[int, str] | None = (begin, scheme)
    while following is not None and (begin := following[0]) <= last:
        scheme = following[1]
        slash = text.find("/", begin, stop)
        authority = stop if slash < 0 else slash
        at = text.rfind("@", begin, authority)
        # If the text before the slash is not a host and port, the slash is part of a password.
        if at < 0 and not re.match(_HOST_AND_PORT, text[begin:authority]):
            at = last
        if at >= 0:
            colon = text.find(":", begin, at)
            if colon >= 0:
                yield from _range(colon + 1, at)
            elif scheme.rpartition("+")[2] not in _WITH_LOGIN:
                yield from _range(begin, at)
        following = next(_addresses(text, max(at + 1, authority), stop), None)
