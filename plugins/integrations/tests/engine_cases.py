"""Tests of installs in an engine, for every kind of server: a strict fake, or the real routes over a fake model."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ckptcore_integrations.engines import Engine, EngineError, EngineRefusedError, install
from ckptcore_versions import Publisher, Version, follow

from ckptcore import Context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, TargetUndefinedError
from plugins.integrations.tests.served_models import ServedModel, weights

FAST = Context(durability="none")


class Served(NamedTuple):
    """A running server.

    Attributes:
        model: its model.
        url: its address.
        engine: its client.
    """

    model: Any
    url: str
    engine: Engine


class Versions:
    """A directory of versions, and a follower of it."""

    def __init__(self, directory: Path) -> None:
        """Own the directory."""
        self.location = directory / "weights"
        self.publisher = Publisher(self.location, context=FAST)
        self.follower = follow(self.location, cache=directory / "cache", context=FAST)

    def publish(self, number: int) -> Version:
        """Publish a version, and return it as followed."""
        self.publisher.publish(number, weights(number))
        version = self.follower.next_version(0)
        assert version is not None
        return version

    def close(self) -> None:
        """Close both."""
        self.follower.close()
        self.publisher.close()


def fail() -> None:
    """Fail, as an error inside the server."""
    raise RuntimeError("out of memory")


class EngineCases(ABC):
    """The tests. A subclass says how to serve, and creates the model and the client."""

    retries_after_a_mixture: bool
    """True if another install repairs a mixture; False if the server must be restarted."""

    @abstractmethod
    def make_model(self) -> ServedModel:
        """Return a model that was just started."""

    @abstractmethod
    def serve(self, model: Any) -> AbstractContextManager[str]:
        """Serve a model, and yield the address."""

    @abstractmethod
    def connect(self, url: str, **options: Any) -> Engine:
        """Return a client."""

    @pytest.fixture
    def served(self) -> Iterator[Served]:
        """Return a running server."""
        model = self.make_model()
        with self.serve(model) as url:
            yield Served(model, url, self.connect(url))

    @pytest.fixture
    def versions(self, tmp_path: Path) -> Iterator[Versions]:
        """Return an empty directory of versions."""
        versions = Versions(tmp_path)
        yield versions
        versions.close()

    def test_every_version_is_installed_labelled_and_served(self, served: Served, versions: Versions) -> None:
        for number in (1, 2, 7):
            install(served.engine, versions.publish(number))
            assert served.model.generate() == {"numbers": [number], "label": str(number)}
            assert served.engine.label() == str(number)

    def test_a_label_of_the_caller_is_used(self, served: Served, versions: Versions) -> None:
        install(served.engine, versions.publish(1), label="run-3/1")
        assert served.engine.label() == "run-3/1"

    def test_checksums_are_equal_for_equal_weights_and_after_another_install(
        self, served: Served, versions: Versions
    ) -> None:
        other = self.make_model()
        with self.serve(other) as url:
            second = self.connect(url)
            assert served.engine.checksum() == second.checksum()
            version = versions.publish(1)
            install(served.engine, version)
            assert served.engine.checksum() != second.checksum()
            install(second, version)
            assert served.engine.checksum() == second.checksum()
            install(second, version)
            assert served.engine.checksum() == second.checksum()

    def test_no_request_sees_two_versions_and_none_fails(self, served: Served, versions: Versions) -> None:
        answers: list[list[dict[str, Any]]] = [[] for _ in range(2)]
        is_over = threading.Event()

        def generate(own: list[dict[str, Any]]) -> None:
            while not is_over.is_set():
                own.append(served.model.generate())

        threads = [threading.Thread(target=generate, args=(own,)) for own in answers]
        for thread in threads:
            thread.start()
        for number in range(1, 4):
            install(served.engine, versions.publish(number))
        is_over.set()
        for thread in threads:
            thread.join()
        for own in answers:
            numbers = [number for answer in own for number in answer["numbers"]]
            assert len(numbers) == len(own) and numbers == sorted(numbers)

    def test_a_server_that_is_not_there_is_not_paused(self, versions: Versions) -> None:
        with self.serve(self.make_model()) as url:
            engine = self.connect(url)
        with pytest.raises(EngineRefusedError, match="cannot be reached"):
            install(engine, versions.publish(1))

    def test_a_version_that_was_removed_or_damaged_is_refused_before_the_pause(
        self, served: Served, versions: Versions
    ) -> None:
        served.model.hook("pause", lambda: pytest.fail("was paused"))
        version = versions.publish(1)
        os.truncate(os.path.join(version.directory, "model.safetensors"), 50)
        with pytest.raises(CorruptCheckpointError):
            install(served.engine, version)
        version.directory = f"{version.directory}/removed"
        with pytest.raises(CheckpointNotFoundError):
            install(served.engine, version)

    def test_a_pause_that_fails_changes_nothing(self, served: Served, versions: Versions) -> None:
        served.model.hook("pause", fail)
        version = versions.publish(1)
        with pytest.raises(EngineError) as raised:
            install(served.engine, version)
        assert "the weights of" in raised.value.__notes__[0]
        assert served.model.generate()["numbers"] == [0]
        install(served.engine, version)
        assert served.model.generate()["numbers"] == [1]

    def test_a_label_that_cannot_be_changed_changes_nothing(self, served: Served, versions: Versions) -> None:
        served.model.hook("relabel", fail)
        version = versions.publish(1)
        with pytest.raises(EngineError):
            install(served.engine, version)
        assert served.model.generate() == {"numbers": [0], "label": "default"}

    def test_a_pause_and_a_resume_that_fail_are_both_reported(self, served: Served, versions: Versions) -> None:
        served.model.hook("pause", fail)
        served.model.hook("resume", fail)
        with pytest.raises(EngineError) as raised:
            install(served.engine, versions.publish(1))
        assert "may be paused" in raised.value.__notes__[1]

    def test_an_install_that_fails_half_way_leaves_the_engine_paused(self, served: Served, versions: Versions) -> None:
        install(served.engine, versions.publish(1))
        served.model.hook("install", fail)
        with pytest.raises(TargetUndefinedError, match=r"version 2 was not installed.*mixture.*not resumed"):
            install(served.engine, versions.publish(2))
        assert served.model.paused
        assert served.engine.label() == "incomplete: 2"
        served.model.hook("pause", fail)  # does not resume the mixture
        with pytest.raises(TargetUndefinedError, match="has the label 'incomplete: 2'"):
            install(served.engine, versions.publish(5))
        assert served.model.paused
        if self.retries_after_a_mixture:
            install(served.engine, versions.publish(6))
        else:
            with pytest.raises(TargetUndefinedError, match="Restart the server"):
                install(served.engine, versions.publish(6))
            assert served.model.paused
            served.model.restart()
            install(served.engine, versions.publish(7))
        assert len(served.model.generate()["numbers"]) == 1

    def test_an_install_that_takes_too_long_leaves_the_engine_paused(self, versions: Versions) -> None:
        model, may_go_on = self.make_model(), threading.Event()
        model.hook("install", lambda: may_go_on.wait(60))
        with self.serve(model) as url:
            with pytest.raises(TargetUndefinedError, match=r"no answer for 0\.5 s"):
                install(self.connect(url, timeout=0.5), versions.publish(1))
            assert model.paused
            may_go_on.set()

    @pytest.mark.parametrize("moment", ["finish", "label"])
    def test_an_engine_with_a_wrong_label_is_not_resumed(self, served: Served, versions: Versions, moment: str) -> None:
        def restart() -> None:
            served.model.restart()
            served.model.paused = True

        served.model.hook(moment, *([lambda: None] if moment == "label" else []), restart)
        with pytest.raises(TargetUndefinedError, match="it restarted, or another program installs"):
            install(served.engine, versions.publish(1))
        assert served.model.paused

    def test_an_engine_whose_label_cannot_be_read_is_not_resumed(self, served: Served, versions: Versions) -> None:
        served.model.hook("label", lambda: None, fail)
        with pytest.raises(TargetUndefinedError, match="its label cannot be checked"):
            install(served.engine, versions.publish(1))
        assert served.model.paused

    def test_a_resume_that_fails_is_reported_with_the_installed_version(
        self, served: Served, versions: Versions
    ) -> None:
        served.model.hook("resume", fail)
        version = versions.publish(1)
        with pytest.raises(EngineError, match="version 1 is installed, but generation does not continue"):
            install(served.engine, version)
        install(served.engine, version)
        assert served.model.generate()["numbers"] == [1]

    def test_an_interrupted_install_says_that_the_engine_may_have_a_mixture(
        self, served: Served, versions: Versions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(directory: str, label: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(served.engine, "install", interrupt)
        with pytest.raises(KeyboardInterrupt) as raised:
            install(served.engine, versions.publish(1))
        assert "was interrupted while it installed version 1" in raised.value.__notes__[0]
        assert served.model.paused

    def test_an_engine_that_restarted_gets_the_version_again(self, served: Served, versions: Versions) -> None:
        version = versions.publish(1)
        install(served.engine, version)
        served.model.restart()
        assert served.engine.label() != "1"
        install(served.engine, version)
        assert served.model.generate() == {"numbers": [1], "label": "1"}
