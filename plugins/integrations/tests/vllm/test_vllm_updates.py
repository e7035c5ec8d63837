"""Versions are installed in a real engine of vLLM with two tensor-parallel workers, over its routes.

`make test-vllm` runs these tests in environments with the lowest and the newest version of vLLM that has a build for
CPUs.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ckptcore_integrations.engines import EngineRefusedError, install
from ckptcore_integrations.vllm_server import VLLMEngine
from ckptcore_testing.servers import Server, ServerCommand
from ckptcore_testing.servers import serve as run_server
from ckptcore_versions import Publisher, Version, follow

import ckptcore
from ckptcore.errors import TargetUndefinedError

SERVER = Path(__file__).with_name("server.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of Hugging Face with three models of the same shape, with tied weights."""
    directories = []
    for number in range(3):
        torch.manual_seed(number)
        config = transformers.Qwen2Config(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        directories.append(tmp_path_factory.mktemp(f"model{number}"))
        transformers.Qwen2ForCausalLM(config).save_pretrained(directories[-1])
    return directories


def command(model: Path, port: int) -> ServerCommand:
    return ServerCommand(
        [sys.executable, str(SERVER), str(port), str(model), "2"], {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


def serve(model: Path, directory: Path) -> Any:
    """Run a server of a model."""
    return run_server(lambda port: command(model, port), directory, path="/weight_info", timeout_seconds=900)


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of the first model, which all tests use in order, until one breaks it."""
    with serve(models[0], tmp_path_factory.mktemp("server")) as running:
        yield running


class Trainer:
    """Publishes weights, and follows them."""

    def __init__(self, directory: Path) -> None:
        self.publisher = Publisher(directory / "weights")
        self.follower = follow(directory / "weights", cache=directory / "cache")

    def publish(self, number: int, weights: Any) -> Version:
        """Publish a version, and return it as followed."""
        self.publisher.publish(number, weights)
        version = self.follower.next_version(0)
        assert version is not None
        return version


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.follower.close()
    trainer.publisher.close()


def generate(server: Server) -> list[int]:
    """Return tokens that the model generates."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    content = json.dumps({"tokens": [5, 6, 7]})
    connection.request("POST", "/generate", content, {"Content-Type": "application/json"})
    tokens: list[int] = json.loads(connection.getresponse().read())["tokens"]
    connection.close()
    return tokens


def client(server: Server, **options: Any) -> VLLMEngine:
    return VLLMEngine(server.url, **options)


def state(server: Server) -> tuple[list[int], str]:
    """Return tokens, and the checksum of all parameters if this version of vLLM has checksums."""
    try:
        return generate(server), client(server).checksum()
    except EngineRefusedError:  # before 0.32
        return generate(server), ""


@pytest.mark.parametrize("pause", ["wait", "abort", "keep"])
def test_an_installed_version_equals_a_fresh_start_with_its_weights(
    server: Server, models: list[Path], trainer: Trainer, pause: Any, tmp_path: Path
) -> None:
    """The third version has the weights of the first model again."""
    engine, states = client(server, pause=pause), {}
    for number in (1, 2, 3):
        version = trainer.publish(number, ckptcore.load(models[number % 3]))
        install(engine, version, label=f"{pause}-{number}")
        assert engine.label() == f"{pause}-{number}"
        states[number % 3] = state(server)
    assert len({tuple(tokens) for tokens, _ in states.values()}) == 3
    if pause == "wait":
        with serve(models[1], tmp_path) as fresh:
            assert state(fresh) == states[1]


def test_a_version_without_a_weight_of_the_model_breaks_the_workers_which_then_refuse_others(
    server: Server, models: list[Path], trainer: Trainer
) -> None:
    weights = ckptcore.load(models[1])
    del weights["model.norm.weight"]
    with pytest.raises(TargetUndefinedError, match="Restart the server"):
        install(client(server), trainer.publish(1, weights))
    assert client(server).label() == "incomplete: 1"
    with pytest.raises(TargetUndefinedError, match="Restart the server"):
        install(client(server), trainer.publish(2, ckptcore.load(models[1])))
    assert "model.norm.weight" in server.log.read_text(errors="replace")
