"""Redaction of URLs: it removes a secret in any encoding, and keeps the text around it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptcore
from ckptcore.commit.location import SubPath
from ckptcore.errors import CheckpointError, StorageError
from ckptcore.redaction import chainable, redacted, redacted_location

SECRET: Final = "canary0secret"

SCHEMES: Final = [
    "https", "http", "s3", "gs", "az", "abfs", "sftp", "ftp", "hf", "webdav+https", "fsspec+s3", "zip://x::s3",
    "unknown",
]  # fmt: skip

NAMES: Final = [
    "access_token", "token", "sig", "Signature", "X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token",
    "X-Goog-Signature", "X-Goog-Credential", "AWSAccessKeyId", "OSSAccessKeyId", "api key", "Authorization", "password",
    "client_secret", "jwt", "SESSION", "sas",
]  # fmt: skip


def _percent(text: str) -> str:
    return "".join([f"%{byte:02X}" for byte in text.encode()])


def _mixed_case(text: str) -> str:
    return "".join([f"%{byte:02x}" if place % 2 else f"%{byte:02X}" for place, byte in enumerate(text.encode())])


def _overlong(text: str) -> str:
    return "".join([f"%{0xC0 | byte >> 6:02X}%{0x80 | byte & 0x3F:02X}" for byte in text.encode()])


def _long_overlong(text: str) -> str:
    return "".join([f"%E0%{0x80 | byte >> 6:02X}%{0x80 | byte & 0x3F:02X}" for byte in text.encode()])


def _full_width(text: str) -> str:
    return "".join([chr(ord(character) + 0xFEE0) if "!" <= character <= "~" else character for character in text])


ENCODINGS: Final[Mapping[str, Callable[[str], str]]] = {
    "none": lambda text: text,
    "quoted": quote,
    "quoted slashes": lambda text: quote(text, safe=""),
    "plus": quote_plus,
    "percent": _percent,
    "mixed case": _mixed_case,
    "double": lambda text: quote(_percent(text)),
    "triple": lambda text: _percent(quote(_percent(text))),
    "often": lambda text: "%" + "25" * 30 + _percent(text)[1:],
    "overlong": _overlong,
    "long overlong": _long_overlong,
    "full width": _full_width,
    "quoted full width": lambda text: quote(_full_width(text)),
    "%u": lambda text: "".join([f"%u{ord(character):04x}" for character in text]),
    "JSON": lambda text: "".join([f"\\u{ord(character):04x}" for character in text]),
    "upper": str.upper,
    "JSON slashes": lambda text: text.replace("/", "\\/"),
    "JSON slashes twice": lambda text: text.replace("/", "\\\\\\/"),
}

PLACES: Final[Mapping[str, str]] = {
    "query": "{scheme}://host/run/x?{parameter}",
    "second parameter": "{scheme}://host/run/x?a=b&{parameter}&c=d",
    "fragment": "{scheme}://host/run/x#{parameter}",
    "path parameter": "{scheme}://host/run;{parameter}/x",
    "nested": "{scheme}://host/run?url=https://other/x?{parameter}",
    "nested in a path": "file:///cache/https://other/x?{parameter}",
    "object": "run/x?{parameter}",
    "object with two": "run/x?a=b&{parameter}",
    "local": "/data/run#{parameter}",
    "bare": "{scheme}://host/x?{secret}",
    "Base64": "{scheme}://host/x?{secret}==",
    "slash removed": "{scheme}:/host/run/x?{parameter}",
    "password": "{scheme}://user:{secret}@host/run/x",
    "password with slashes": "{scheme}://user:a/{secret}:/b@host/run/x",
    "password of a nested URL": "{scheme}://host/run?url=ftp://user:{secret}@other/x",
    "password in a path": "{scheme}://host/https://user:{secret}@other/x",
    "password without scheme": "//user:{secret}@host/run/x",
    "user": "https://{secret}@host/run/x",
}


def _decoded_fully(text: str) -> str:
    """Decode a text repeatedly, like a lenient reader, until it does not change."""
    import re
    import unicodedata

    while True:
        decoded = re.sub(r"(?:%|\\)u([0-9a-fA-F]{4})", lambda escape: chr(int(escape[1], 16)), text)
        decoded = re.sub(r"%([0-9a-fA-F]{2})", lambda escape: chr(int(escape[1], 16)), decoded)
        decoded = re.sub(
            "\xe0?[\x81-\xc1][\x80-\xbf]",
            lambda pair: chr((ord(pair[0][-2]) & 3) << 6 | ord(pair[0][-1]) & 63),
            decoded,
        )
        decoded = unicodedata.normalize("NFKC", decoded)
        if decoded == text:
            return decoded
        text = decoded


@given(
    scheme=st.sampled_from(SCHEMES),
    name=st.sampled_from(NAMES),
    place=st.sampled_from(sorted(PLACES)),
    of_name=st.sampled_from(sorted(ENCODINGS)),
    of_secret=st.sampled_from(sorted(ENCODINGS)),
    of_all=st.sampled_from(sorted(ENCODINGS)),
    around=st.sampled_from([("", ""), ("cannot read ", ": it failed"), ("url=URL('", "')"), ('{"url": "', '"}')]),
)
def test_no_form_of_a_secret_remains(
    scheme: str, name: str, place: str, of_name: str, of_secret: str, of_all: str, around: tuple[str, str]
) -> None:
    secret = ENCODINGS[of_secret](SECRET)
    url = PLACES[place].format(scheme=scheme, secret=secret, parameter=f"{ENCODINGS[of_name](name)}={secret}")
    text = f"{around[0]}{ENCODINGS[of_all](url)}{around[1]}"
    shown = redacted(text)
    assert SECRET not in _decoded_fully(shown).lower()
    assert redacted(shown) == shown
    assert shown.startswith(around[0][:12] if " " in around[0] else "")
    error = StorageError(text)
    error.add_note(text)
    assert SECRET not in _decoded_fully("".join(traceback.format_exception(error)) + repr(error)).lower()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_secrets_in_each_place_and_encoding_are_hidden(place: str, encoding: str) -> None:
    encode = ENCODINGS[encoding]
    for name in NAMES:
        url = PLACES[place].format(scheme="gs", secret=SECRET, parameter=f"{encode(name)}={SECRET}")
        assert SECRET not in _decoded_fully(redacted(url)).lower()
        assert SECRET not in _decoded_fully(redacted(encode(url))).lower()


KEPT: Final = [
    "w['layer:0'].weight: expected float32[4], found float16[4]",
    "file:///run?lr=0.1/step_1",
    "/data/run#2/step_100%",
    "/data/100%25/run?lr=0.1&wd=0",
    "C:/run?lr=0.1",
    "s3://bucket/run/2026-01-01T00:00:00/a%20b",
    "s3://bucket/r%C3%A9sum%C3%A9/x",
    "gs://bucket/run: 404",
    "model//weight: it has no chunk",
    "s3://bucket/run+1/a@b/c",
    "hdfs://user@node:9000/x",
    "s3://bucket:x",
    "s3://bucket/lr=0.1;wd=0.01/step_5",
    "s3://bucket/a;monkey=1;design=2/step_5",
    "/data/run?design=1&monkey=2&author=me&passes=3#keypoints=4;signal=5;KEYPOINTS=6",
    "#1 = 3; key=val",
    "",
]


@pytest.mark.parametrize("text", KEPT)
def test_other_text_is_kept(text: str) -> None:
    assert redacted(text) == text


def test_only_the_secret_is_hidden() -> None:
    url = f"gs://bucket/run/x%3Faccess%5Ftoken%3D{SECRET}%26a%3Db/w: not found"
    assert redacted(url) == "gs://bucket/run/x%3Faccess%5Ftoken%3D***%26a%3D***/w: not found"
    assert redacted(f"x%253Faccess%255Ftoken%253D{SECRET}/w") == "x%253Faccess%255Ftoken%253D***/w"
    assert redacted(f"https://a/x?u=https%3A%2F%2Fb%3Ftoken%3D{SECRET}&c=d") == "https://a/x?u=***%3Ftoken%3D***&c=***"


@pytest.mark.parametrize(
    "name",
    [*NAMES, "access_key", "accesskey", "apikey", "ApiKey", "AccountKey", "key", "KEY2", "userKey", "sig", "x-auth",
     "PASS", "AWSACCESSKEYID", "x-amz-security-token", "sessionId", "myJWT", "oauth_x", "db.pass"],
)  # fmt: skip
def test_parameters_with_secret_names_in_a_path_are_hidden(name: str) -> None:
    assert redacted(f"/data/run;{name}={SECRET}") == f"/data/run;{name}=***"
    assert redacted(f"s3://b/run;lr=1;{name}={SECRET};wd=2") == f"s3://b/run;lr=1;{name}=***;wd=2"


def test_urls_with_escaped_slashes_of_json_are_redacted() -> None:
    assert redacted(r'{"url":"https:\/\/u:PW@h\/x?token=T"}') == r'{"url":"https:\/\/u:***@h\/x?token=***"}'
    assert redacted(r'"https:\\/\\/u:PW@h\\/x"') == r'"https:\\/\\/u:***@h\\/x"'


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (f"https://h/a?token=abc {SECRET}", "https://h/a?token=***"),
        (f'https://h/a?token="{SECRET}" <x>', "https://h/a?token=***"),
        (f's3://user:pa"{SECRET}@host/x', "s3://user:***@host/x"),
        (f"s3://user:a b<{SECRET}>@host/x y", "s3://user:***@host/x y"),
        ("/data/my run; key=1/step 5", "/data/my run; key=1/step 5"),
        ("s3://bucket/my <run>/x", "s3://bucket/my <run>/x"),
    ],
)
def test_a_location_with_spaces_and_quotes_is_redacted_as_a_whole(location: str, shown: str) -> None:
    assert redacted_location(location) == shown
    assert redacted_location(shown) == shown
    assert str(SubPath(location, "a")) == f"{shown}/a"


def test_errors_show_a_location_without_its_secrets() -> None:
    for start in ("s3://", "gs://", "https://", "s3:/", "unknown://"):
        with pytest.raises(CheckpointError) as caught:
            ckptcore.load(f'{start}user:pa "{SECRET}@host/x')
        assert SECRET not in str(caught.value), start


def test_a_text_that_is_encoded_too_often_is_hidden_as_a_whole() -> None:
    assert redacted(f"cannot read gs://b/%{'25' * 40}3Fsig={SECRET} now") == "cannot read *** now"


def test_errors_in_a_group_are_searched() -> None:
    url = f"https://host/x?token={SECRET}"
    assert chainable(ExceptionGroup("several", [ValueError("plain"), OSError(url)])) is None
    assert chainable(ExceptionGroup("several", [ValueError("plain")])) is not None


LONG: Final[Mapping[str, Callable[[int], str]]] = {
    "letters": lambda n: "a" * n + " a:/b",
    "percent": lambda n: "%25" * n,
    "schemes": lambda n: "ab:/" * n,
    "addresses": lambda n: "ab://c:d/" * n + "@",
    "parameters": lambda n: "?" + "&token=x" * n,
    "ampersands": lambda n: "s3://b/?" + "&" * n,
    "equals": lambda n: "s3://b/?x" + "=" * n,
    "words": lambda n: "a " * n + "a:/b",
    "continued": lambda n: "a:/b" + " c=" * n + " d" * n,
    "semicolons": lambda n: "s3://b" + ";" * n,
    "escapes": lambda n: "?token=%C3" * n,
    "users": lambda n: "s3://" + "a:b@" * n,
    "tail": lambda n: "s3://b?x=" + "." * n + "x",
}


@pytest.mark.parametrize("form", LONG)
def test_the_work_is_linear(form: str) -> None:
    """Error texts may contain names of hostile checkpoints. The test counts calls and searched characters."""
    counts = []
    for size in (2_000, 4_000, 8_000):
        text, count = LONG[form](size), 0

        def trace(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(trace)
        try:
            redacted(text)
        finally:
            sys.setprofile(None)
        counts.append(count + 200)
    assert counts[1] <= 2.3 * counts[0]
    assert counts[2] <= 2.3 * counts[1]
