"""Storage buckets of Hugging Face through their S3 gateway, tested with a server that follows its documentation."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.context import IOOptions
from ckptcore.errors import AtomicityError, CheckpointError, ConditionFailedError
from ckptcore.model import JSON
from ckptcore.protocols import IfTag
from ckptcore.runtime import runtime_of
from plugins.storage_s3.tests.hub_gateway import HubGateway
from plugins.storage_s3.tests.stub_server import Reply, Request, StubServer, stub_server

LARGE = {"w": np.arange(700_000.0), "step": 1}  # more than one part of an upload
LOCATION = "s3://box/runs/1"


@pytest.fixture
def gateway() -> HubGateway:
    """A gateway that checks conditions, as documented."""
    return HubGateway()


@pytest.fixture
def stub(gateway: HubGateway) -> Iterator[StubServer]:
    """A server that answers like this gateway."""
    with stub_server(gateway) as server:
        yield server


def context_of(stub: StubServer, io: IOOptions | None = None) -> ckptcore.Context:
    """Return the settings that the documentation of ckptcore recommends, but with the address of the local server."""
    config: dict[str, JSON] = {
        "endpoint": f"{stub.url}/team", "region": "us-east-1", "addressing_style": "path", "access_key_id": "HFAK1",
        "secret_access_key": "hidden", "part_bytes": 5 << 20, "retries": 2, "first_wait": 0.001,
    }  # fmt: skip
    return ckptcore.Context(storage={"s3": config}, io=io or IOOptions())


@pytest.mark.lives(
    "Hugging Face storage buckets",
    "a server that answers as the S3 gateway is documented; the service was not tried",
    "saves, loads, runs; one commit for each save",
    "an upload is completed without a condition, right after a check; no atomic replacement",
)
def test_a_run_is_fenced(stub: StubServer, gateway: HubGateway) -> None:
    context = context_of(stub)
    with ckptcore.Checkpointer("s3://box/runs", context=context) as run:
        for step in range(3):
            run.save_blocking(step, LARGE)
        assert run.load(1)["step"] == 1
    assert ckptcore.verify("s3://box/runs/2", context=context).ok
    ckptcore.save("s3://box/runs/2", LARGE, overwrite="non-atomic", context=context)
    ckptcore.delete("s3://box/runs/1", context=context)
    with ckptcore.CheckpointReader("s3://box/runs", context=context) as reader:
        assert list(reader.steps) == [0, 2]
    assert not gateway.redirected, "tags of other servers need not be those of the gateway"
    assert not gateway.uploads


@pytest.mark.parametrize("lost", [1, 3])
def test_lost_answers_without_metadata(lost: int, stub: StubServer, gateway: HubGateway) -> None:
    """The gateway does not store the id of a put. The content of the objects shows which save wrote them."""
    context = context_of(stub)
    gateway.lost = lost
    ckptcore.save(LOCATION, {"w": np.ones(10)}, context=context)
    assert ckptcore.load(LOCATION, context=context)["w"].sum() == 10
    tag = open_directory(LOCATION, runtime_of(context).storages).get_with_tag("checkpoint.json")[1]
    storage = open_directory(LOCATION, runtime_of(context).storages, to_write=True)
    storage.put("checkpoint.json", b"{}", condition=IfTag(tag))
    with pytest.raises(ConditionFailedError):
        storage.put("checkpoint.json", b"late", condition=IfTag(tag))


def test_a_lost_answer_to_a_completion(stub: StubServer, gateway: HubGateway) -> None:
    gateway.lost_completions = 1
    ckptcore.save(LOCATION, LARGE, context=context_of(stub))
    assert not gateway.lost_completions
    assert ckptcore.verify(LOCATION, context=context_of(stub)).ok


def test_one_of_two_savers_commits(stub: StubServer) -> None:
    begin = threading.Barrier(2)
    outcomes: list[CheckpointError | None] = []

    def save(value: int) -> None:
        begin.wait()
        try:
            ckptcore.save(LOCATION, {"w": np.full(10, value)}, context=context_of(stub))
        except CheckpointError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    savers = [threading.Thread(target=save, args=(value,)) for value in (1, 2)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert len(outcomes) == 2 and outcomes.count(None) == 1, outcomes
    assert ckptcore.load(LOCATION, context=context_of(stub))["w"][0] in (1, 2)


def test_a_gateway_without_conditions_needs_a_declaration(stub: StubServer, gateway: HubGateway) -> None:
    gateway.checks = False
    with pytest.raises(AtomicityError, match="without_conditions"):
        ckptcore.save(LOCATION, LARGE, context=context_of(stub))
    declared = context_of(stub, IOOptions(without_conditions="marker"))
    ckptcore.save(LOCATION, LARGE, context=declared)
    assert ckptcore.load(LOCATION, context=declared)["step"] == 1


def test_other_clients_would_be_redirected(stub: StubServer, gateway: HubGateway) -> None:
    request = Request("GET", "/team/box/a", {}, {"authorization": "Credential=HFAK1", "user-agent": "curl"}, b"")
    gateway.objects["a"] = b"1"
    assert gateway(request) == Reply(302, b"", {"location": "https://cdn.invalid/data?Signature=x"})
    storage = open_directory("s3://box", runtime_of(context_of(stub)).storages)
    assert storage.get("a") == b"1"
    gateway.objects["tab\tname"] = b"1"
    assert storage.get("tab\tname") == b"1", "by requests of our own, as in a forked child"
