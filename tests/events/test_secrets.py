"""Secrets in URLs: no output shows a password, token or signature, for all functions that take a URL."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.errors import CheckpointError, StorageError
from ckptcore.events import Event, logger_named
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from ckptcore.redaction import chainable, redacted

SECRET = "canary0secret"

URLS = [
    f"https://user:{SECRET}@127.0.0.1:9/run/x",
    f"https://{SECRET}@127.0.0.1:9/run/x",
    f"https://127.0.0.1:9/run/x?X-Amz-Signature={SECRET}&token={SECRET}",
    f"https:/user:{SECRET}@127.0.0.1:9/run/x",
    f"http://127.0.0.1:9/run/x#token={SECRET}",
    f"s3://user:{SECRET}@bucket/run/x",
    f"s3://bucket/run/x?X-Amz-Signature={SECRET}",
    f"gs://user:{SECRET}@bucket/run/x",
    f"gs://bucket/run/x?token={SECRET}",
    f"sftp://user:{SECRET}@127.0.0.1:9/run/x",
    f"ftp://user:{SECRET}@127.0.0.1:9/run/x",
    f"ftp://user:{SECRET}/{SECRET}@127.0.0.1:9/run/x",
    f"fsspec+https://user:{SECRET}@127.0.0.1:9/run/x",
    f"unknown://user:{SECRET}@host/run/x?token={SECRET}",
]

STATE = {"w": np.arange(4)}

CALLS: Mapping[str, Callable[[str, ckptcore.Context], object]] = {
    "save": lambda url, context: ckptcore.save(url, STATE, context=context),
    "save_async": lambda url, context: ckptcore.save_async(url, STATE, context=context).result(),
    "load": lambda url, context: ckptcore.load(url, context=context),
    "load_into": lambda url, context: ckptcore.load_into(url, {"w": np.zeros(4, int)}, context=context),
    "iter_boxes": lambda url, context: list(ckptcore.open(url, context=context).iter_boxes()),
    "open": lambda url, context: ckptcore.open(url, context=context),
    "metadata": lambda url, context: ckptcore.metadata(url, context=context),
    "verify": lambda url, context: ckptcore.verify(url, context=context),
    "delete": lambda url, context: ckptcore.delete(url, context=context),
    "copy": lambda url, context: ckptcore.copy(url, "memory://secrets/there", context=context),
    "Checkpointer": lambda url, context: _train(url, context),
    "CheckpointReader": lambda url, context: ckptcore.CheckpointReader(url, context=context),
}


def _train(url: str, context: ckptcore.Context) -> None:
    with ckptcore.Checkpointer(url, context=context) as checkpointer:
        repr(checkpointer)
        checkpointer.save(1, STATE)


class _Refusing:
    """A plugin for a scheme, whose library raises errors with whole URLs."""

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"refusing": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        cause = OSError(f"404, url={url!r}")
        raise StorageError(f"cannot open {url}: {cause}") from chainable(cause)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Yield a list for texts of events, then add the log, and assert that no secret is in it."""
    texts: list[str] = []
    with caplog.at_level(logging.DEBUG, "ckptcore"), caplog.at_level(logging.DEBUG, "ckptcore_fsspec"):
        yield texts
    for record in caplog.records:
        if record.name.startswith("ckptcore"):
            texts += [record.getMessage(), str(record.__dict__.get("ckptcore_event")), record.exc_text or ""]
    assert SECRET not in "\n".join(texts)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("url", [*URLS, f"refusing://user:{SECRET}@host/run/x?token={SECRET}"])
def test_no_error_and_no_event_shows_a_secret(name: str, url: str, told: list[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    events: list[Event] = []
    context = ckptcore.Context(
        observers=(events.append,),
        plugins=ckptcore.context.PluginOptions(extra=(_Refusing(),)),
        storage={
            scheme: {"endpoint": "http://127.0.0.1:9", "anonymous": True, "retries": 0} for scheme in ("s3", "gs")
        },
    )
    with pytest.raises(Exception) as caught:  # the type depends on the scheme
        CALLS[name](url, context)
    texts = traceback.format_exception(caught.value)
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("    ")]
    assert SECRET not in "\n".join(lines)
    assert isinstance(caught.value, CheckpointError)
    assert SECRET not in repr(caught.value)
    assert SECRET not in repr(events)


def test_no_successful_command_shows_a_secret(tmp_path: Path, told: list[str]) -> None:
    run = f"fsspec+memory://user:{SECRET}@host/{tmp_path.name}"
    context = ckptcore.Context(io=ckptcore.context.IOOptions(without_conditions="marker"))
    with ckptcore.Checkpointer(run, context=context) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, {"w": np.ones(4)})
    for command, *arguments in [
        ["inspect", f"{run}/1"],
        ["verify", f"{run}/1"],
        ["ls", run],
        ["steps", run],
        ["diff", f"{run}/1", f"{run}/2"],
        ["consolidate", f"{run}/1", str(tmp_path / "weights")],
        ["copy", f"{run}/1", str(tmp_path / "copy")],
        ["gc", run, "--policy", "latest_n=1", "--dry-run"],
        ["view", f"{run}/1", "--out", str(tmp_path / "report.html")],
    ]:
        for form in ([], ["--json"]):
            overwrite = ["--overwrite"] if command in ("copy", "consolidate") else []
            result = CliRunner().invoke(application, [command, *arguments, *form, *overwrite])
            assert SECRET not in result.output
            assert result.exit_code in (0, 1), result.output


def test_the_log_of_a_failing_observer_shows_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    def export(event: Event) -> None:
        raise OSError(f"cannot send to https://user:{SECRET}@127.0.0.1:9/?token={SECRET}")

    with caplog.at_level(logging.WARNING, "ckptcore"):
        ckptcore.save("memory://secrets/observed", STATE, context=ckptcore.Context(observers=(export,)))
    formatted = "".join([logging.Formatter().format(record) for record in caplog.records])
    assert "cannot send to https://user:***@127.0.0.1:9/?token=***" in formatted
    assert SECRET not in formatted
    assert all(record.exc_info is None for record in caplog.records)


def test_the_traceback_of_other_errors_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    logger = logger_named("ckptcore.some")
    assert logger is logger_named("ckptcore.some")
    assert len(logger.filters) == 1
    with caplog.at_level(logging.WARNING, "ckptcore"):
        try:
            raise OSError("plain")
        except OSError:
            logger.exception("failed: %s", f"https://host/x?token={SECRET}")
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.getMessage() == "failed: https://host/x?token=***"


def test_the_repr_of_options_has_no_values() -> None:
    options = StorageOptions(config={"secret_access_key": SECRET})
    assert SECRET not in repr(options) + str(options)
    assert "secret_access_key" in repr(options)
    assert SECRET not in repr(ckptcore.Context(storage={"s3": {"secret_access_key": SECRET}}))


REDACTED = {
    f"https://user:{SECRET}@host/a?x={SECRET}&y={SECRET}": "https://user:***@host/a?x=***&y=***",
    f"see 'https://host/a?sig={SECRET}').": "see 'https://host/a?sig=***').",
    f"https://{SECRET}@host/x": "https://***@host/x",
    f"https://host/x?{SECRET}": "https://host/x?***",
    f"ftp://user:{SECRET}/{SECRET}@host:9/x": "ftp://user:***@host:9/x",
    f"url=URL('https://user:{SECRET}@host/x')": "url=URL('https://user:***@host/x')",
    f"the key 'x?X-Amz-Signature={SECRET}/w'": "the key 'x?X-Amz-Signature=***/w'",
    f"GET http://host/x%3FX-Amz-Signature%3D{SECRET}%26token%3D{SECRET}/w in 3 ms": (
        "GET http://host/x%3FX-Amz-Signature%3D***%26token%3D***/w in 3 ms"
    ),
    f"cannot read s3://bucket/x?token={SECRET}: it failed": "cannot read s3://bucket/x?token=***: it failed",
    "sftp://user@host/x": "sftp://user@host/x",
    "s3://bucket/a@b/c": "s3://bucket/a@b/c",
    "https://host:9000/a@b": "https://host:9000/a@b",
    "file:///run?lr=0.1/step_1": "file:///run?lr=0.1/step_1",
    "expected a == b, x=3 and C:/x": "expected a == b, x=3 and C:/x",
}
"""Texts with and without secrets, and their redacted forms."""


@pytest.mark.parametrize("text", REDACTED)
def test_redacted_text_is_as_expected(text: str) -> None:
    assert redacted(text) == REDACTED[text]
    assert redacted(redacted(text)) == REDACTED[text]


def test_an_error_shows_no_secret_in_any_form() -> None:
    url = f"https://user:{SECRET}@host/x"
    error = StorageError(f"cannot read {url}")
    error.add_note(f"and then {url}")
    assert SECRET not in "".join(traceback.format_exception(error)) + repr(error)
    assert chainable(error) is error
    assert chainable(OSError(url)) is None
    assert chainable(OSError("plain")) is not None
    try:
        try:
            raise OSError(url)
        except OSError as inner:
            raise ValueError("plain") from inner
    except ValueError as outer:
        assert chainable(outer) is None


def test_a_location_with_a_password_works(tmp_path: Path) -> None:
    """The storage is opened with the password. Output and stored data hide it."""
    urls: list[str] = []

    class Plugin:
        @ckptcore.hookimpl
        def ckpt_storages(self) -> Mapping[str, StorageOpener]:
            return {"guarded": self.open}

        def open(self, url: str, options: StorageOptions) -> StorageBackend:
            urls.append(url)
            return LocalStorage(str(tmp_path), options)

    events: list[Event] = []
    context = ckptcore.Context(observers=(events.append,), plugins=ckptcore.context.PluginOptions(extra=(Plugin(),)))
    url = f"guarded://user:{SECRET}@host/x"
    with ckptcore.Checkpointer(url, context=context) as checkpointer:
        checkpointer.save(1, STATE)
        assert SECRET not in repr(checkpointer)
    handle = ckptcore.save_async(f"{url}/step", STATE, context=context)
    handle.result()
    assert SECRET not in repr(handle)
    assert ckptcore.load(f"{url}/step", context=context)["w"].tolist() == [0, 1, 2, 3]
    assert urls and all(SECRET in opened_url for opened_url in urls)
    assert events and SECRET not in repr(events)
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert stored and not any(SECRET.encode() in data for data in stored)


def test_the_values_of_options_are_not_shown(tmp_path: Path) -> None:
    for scheme in ("file", "s3", "gs", "sftp"):
        context = ckptcore.Context(storage={scheme: {"pasword": SECRET}})
        with pytest.raises((CheckpointError, ValueError)) as caught:
            ckptcore.load(f"{scheme}://{tmp_path}/bucket/x", context=context)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["verify"], ["ls"], ["steps"], ["inspect", "--json"], ["ls", "--json"]]
)
def test_failing_commands_show_no_secret(arguments: list[str], told: list[str]) -> None:
    for url in (f"https://user:{SECRET}@127.0.0.1:9/run/x", f"s3://user:{SECRET}@bucket/x"):
        result = CliRunner().invoke(application, [arguments[0], url, *arguments[1:]])
        assert result.exit_code
        assert SECRET not in result.output


def test_a_cyclic_error_chain_is_searched_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert chainable(first) is first
    second.args = ("https://host/a?token=canary",)
    assert chainable(first) is None
