"""The weight transfer for TRL publishes versions, and lets TRL go on when the servers have them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_integrations.engines import EngineError, install
from ckptcore_integrations.sglang import SGLangEngine
from ckptcore_integrations.trl import VersionTransfer
from ckptcore_integrations.vllm_server import VLLMEngine
from ckptcore_versions import Publisher, follow

from ckptcore import Context
from ckptcore.errors import DirectoryInUseError
from ckptcore.policies import LatestN
from plugins.integrations.tests.engine_servers import serve, sglang_answer, vllm_answer
from plugins.integrations.tests.served_models import NAMES, SGLangModel, VLLMModel

FAST = Context(durability="none")


def tensors(number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a version, in one memory."""
    memory = torch.empty(6, 8)
    for name in NAMES:
        yield name, memory.fill_(number)


class Servers:
    """A server of SGLang and one of vLLM, and for each a program that follows and installs."""

    def __init__(self, directory: Path, held: ExitStack) -> None:
        self.models = [SGLangModel(), VLLMModel()]
        answers: list[Any] = [sglang_answer, vllm_answer]
        kinds: list[Any] = [SGLangEngine, VLLMEngine]
        self.engines = []
        for number, (model, answer, kind) in enumerate(zip(self.models, answers, kinds, strict=True)):
            url = held.enter_context(serve(functools.partial(answer, model)))
            self.engines.append(kind(url))
            follower = held.enter_context(
                follow(directory / "weights", cache=directory / f"cache-{number}", poll_seconds=0.02, context=FAST)
            )
            thread = threading.Thread(target=self._install, args=(kind(url), follower))
            thread.start()
            held.callback(thread.join)
            held.callback(follower.close)

    def _install(self, engine: Any, follower: Any) -> None:
        for version in follower:
            install(engine, version)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_training_goes_on_when_every_server_has_the_version(tmp_path: Path, held: ExitStack) -> None:
    servers = Servers(tmp_path, held)
    transfer = VersionTransfer(tmp_path / "weights", servers.engines, timeout=120, context=FAST)
    transfer.init_weight_transfer()
    for number in (1, 2):
        transfer.pause()
        transfer.send_weights(tensors(number))
        transfer.resume()
        assert [model.generate() for model in servers.models] == [{"numbers": [number], "label": str(number)}] * 2
    transfer.destroy()
    transfer.destroy()


def test_a_server_that_does_not_get_the_version_is_named(tmp_path: Path, held: ExitStack) -> None:
    model = SGLangModel()
    url = held.enter_context(serve(functools.partial(sglang_answer, model)))
    transfer = VersionTransfer(tmp_path, [SGLangEngine(url)], timeout=0.01, context=FAST)
    transfer.init_weight_transfer()
    transfer.send_weights(tensors(1))
    with pytest.raises(EngineError, match=f"{url} has the label 'default' .* after version 1 was published"):
        transfer.resume()
    transfer.destroy()


def test_a_server_that_does_not_answer_is_waited_for(tmp_path: Path, held: ExitStack) -> None:
    model = SGLangModel()
    url = held.enter_context(serve(functools.partial(sglang_answer, model)))
    transfer = VersionTransfer(tmp_path, [SGLangEngine(url)], timeout=120, context=FAST)
    transfer.init_weight_transfer()
    transfer.send_weights(tensors(1))

    def fail_and_have_the_version() -> None:
        model.label = "1"
        raise RuntimeError("starting")

    model.hook("label", fail_and_have_the_version)
    transfer.resume()
    assert not model.hooks["label"]
    transfer.destroy()


def test_versions_go_on_after_those_of_an_earlier_run(tmp_path: Path) -> None:
    with Publisher(tmp_path, context=FAST) as publisher:
        publisher.publish(7, dict(tensors(0)))
    transfer = VersionTransfer(tmp_path, [], context=FAST, keep=LatestN(1), full_every=1)
    transfer.init_weight_transfer()
    for number in (1, 2):
        transfer.send_weights(tensors(number))
        transfer.resume()
    transfer.destroy()
    assert [path.name for path in tmp_path.glob("v*")] == ["v000009"]


def test_a_transfer_without_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="call init_weight_transfer first"):
        VersionTransfer(tmp_path, []).send_weights(tensors(1))
    with Publisher(tmp_path, context=FAST), pytest.raises(DirectoryInUseError):
        VersionTransfer(tmp_path, [], context=FAST).init_weight_transfer()
