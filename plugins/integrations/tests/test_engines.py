"""Versions are installed in SGLang and vLLM over HTTP: here in strict servers, see `engine_servers`."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from ckptcore_integrations.engines import Engine, EngineError, EngineRefusedError, install
from ckptcore_integrations.sglang import SGLangEngine
from ckptcore_integrations.vllm_server import VLLMEngine

from ckptcore.errors import TargetUndefinedError
from plugins.integrations.tests.engine_cases import EngineCases, Served, Versions
from plugins.integrations.tests.engine_servers import Answer, Request, serve, sglang_answer, vllm_answer
from plugins.integrations.tests.served_models import SGLangModel, VLLMModel


class TestSGLang(EngineCases):
    """SGLang."""

    retries_after_a_mixture = True

    def make_model(self) -> SGLangModel:
        return SGLangModel()

    def serve(self, model: SGLangModel) -> AbstractContextManager[str]:
        return serve(functools.partial(sglang_answer, model))

    def connect(self, url: str, **options: Any) -> Engine:
        return SGLangEngine(url, **options)

    def test_a_link_is_the_path_that_the_server_reports(
        self, served: Served, versions: Versions, tmp_path: Path
    ) -> None:
        link = tmp_path / "policy"
        engine = SGLangEngine(served.url, link=link)
        for number in (1, 2):
            version = versions.publish(number)
            install(engine, version)
            assert os.readlink(link) == version.directory and served.model.model_path == str(link)
            assert served.model.generate()["numbers"] == [number]
        assert [name for name in os.listdir(tmp_path) if name.startswith("policy")] == ["policy"]

    def test_a_link_that_is_a_directory_is_not_replaced(
        self, served: Served, versions: Versions, tmp_path: Path
    ) -> None:
        (tmp_path / "policy").mkdir()
        with pytest.raises(EngineRefusedError, match="expected a symbolic link"):
            install(SGLangEngine(served.url, link=tmp_path / "policy"), versions.publish(1))
        assert served.model.generate()["numbers"] == [0]


class TestVLLM(EngineCases):
    """vLLM."""

    retries_after_a_mixture = False

    def make_model(self) -> VLLMModel:
        return VLLMModel()

    def serve(self, model: VLLMModel) -> AbstractContextManager[str]:
        return serve(functools.partial(vllm_answer, model))

    def connect(self, url: str, **options: Any) -> Engine:
        return VLLMEngine(url, **options)

    def test_an_update_that_cannot_begin_leaves_the_engine_paused(self, served: Served, versions: Versions) -> None:
        """An error of a worker can break the queues between vLLM's processes."""
        served.model.is_active = True  # such as after a client was killed
        with pytest.raises(TargetUndefinedError, match="Restart the server"):
            install(served.engine, versions.publish(1))
        assert served.model.paused

    def test_a_route_that_is_missing_after_the_pause_changes_nothing(self, versions: Versions) -> None:
        model = VLLMModel()

        def answer(request: Request) -> Answer:
            return (404, {}) if request.path == "/start_weight_update" else vllm_answer(model, request)

        with serve(answer) as url, pytest.raises(EngineRefusedError, match="status 404"):
            install(VLLMEngine(url), versions.publish(1))
        assert model.generate() == {"numbers": [0], "label": "default"}

    def test_a_route_that_is_missing_after_the_begin_leaves_the_engine_paused(self, versions: Versions) -> None:
        model = VLLMModel()

        def answer(request: Request) -> Answer:
            return (404, {}) if request.path == "/update_weights" else vllm_answer(model, request)

        with serve(answer) as url, pytest.raises(TargetUndefinedError, match="status 404"):
            install(VLLMEngine(url), versions.publish(1))
        assert model.paused

    def test_a_server_without_the_routes_is_named_with_what_to_do(self, versions: Versions) -> None:
        expected = pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1")
        with serve(lambda request: (404, {"detail": "Not Found"})) as url, expected:
            install(VLLMEngine(url), versions.publish(1))


ENGINES = [SGLangEngine, VLLMEngine]


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_the_key_is_sent_and_never_shown(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    received: list[Request] = []

    def answer(request: Request) -> Answer:
        received.append(request)
        return 401, {"error": "Unauthorized"}

    caplog.set_level(logging.DEBUG)
    with serve(answer) as url:
        engine = kind(url, api_key="s3cret")
        with pytest.raises(EngineRefusedError, match="status 401") as raised:
            engine.label()
    assert received[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in f"{raised.value!r} {engine!r} {caplog.text}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, b"<html>"), "expected JSON, found '<html>'"),
        ((200, b"[1]"), "expected a JSON object"),
        ((200, b"[" * 100_000), "expected JSON"),
        ((200, {"weight_version": 7}), "found weight_version=7"),
        ((302, b""), "status 302"),
        ((503, b"x" * 10_000), "status 503: x{500}$"),
    ],
)
def test_an_answer_of_other_software_is_an_error(kind: Any, answer: Answer, expected: str) -> None:
    with serve(lambda request: answer) as url, pytest.raises(EngineError, match=expected):
        kind(url).label()


def test_a_server_that_closes_the_connection_may_have_done_the_request(kind: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_one() -> None:
            connection, _ = listener.accept()
            connection.recv(10)
            connection.close()

        thread = threading.Thread(target=close_one)
        thread.start()
        with pytest.raises(EngineError, match="the connection failed") as raised:
            kind(f"http://127.0.0.1:{listener.getsockname()[1]}").pause()
        thread.join()
    assert not isinstance(raised.value, EngineRefusedError)


def test_an_install_in_a_server_of_another_kind_is_refused(versions_of_one: Any, kind: Any) -> None:
    model = SGLangModel() if kind is VLLMEngine else VLLMModel()
    answer: Any = sglang_answer if kind is VLLMEngine else vllm_answer
    with serve(functools.partial(answer, model)) as url, pytest.raises(EngineRefusedError, match="status 404"):
        install(kind(url), versions_of_one)
    assert not model.paused


@pytest.fixture
def versions_of_one(tmp_path: Path) -> Iterator[Any]:
    versions = Versions(tmp_path)
    yield versions.publish(1)
    versions.close()


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://localhost", "http://", "http://a/?x=1", "http://a:99999"])
def test_an_address_that_is_none_is_refused(kind: Any, url: str) -> None:
    with pytest.raises(ValueError, match="url: expected the address of a server|Port out of range"):
        kind(url)


def test_wrong_options_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="must not contain a password") as raised:
        kind("http://user:s3cret@localhost")
    assert "s3cret" not in str(raised.value)
    with pytest.raises(ValueError, match="pause='later'"):
        kind("http://localhost", pause="later")
    for timeout in (0, -1, float("nan"), float("inf"), "5", None, True, 10**400, 10**5000):
        with pytest.raises((TypeError, ValueError), match="timeout=.* expected a .*number of seconds"):
            kind("http://localhost", timeout=timeout)
    with pytest.raises(TypeError, match="url='3': expected the address"):
        kind(3)
    for key in ("s3cret\n", "s3cr\u00e9t"):
        with pytest.raises(ValueError, match="api_key: expected printable") as raised:
            kind("http://localhost", api_key=key)
        assert "s3cr" not in str(raised.value)
