"""Bytes read by the shared loads of a job of four processes, which send data with gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import ckptcore
from plugins.torch_backend.tests.conftest import Torchrun

sys.path.insert(0, str(Path(__file__).parent))
import broadcast_job  # the module that the processes run

pytestmark = [pytest.mark.slow, pytest.mark.system]

PROGRAM = Path(__file__).with_name("broadcast_job.py")


@pytest.fixture(scope="module")
def read(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """The bytes read by each rank, for each way to read and each kind of tensors."""
    directory = tmp_path_factory.mktemp("broadcast")
    ckptcore.save(directory / "saved", broadcast_job.state())
    torchrun(4, PROGRAM, directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]


STORED = sum(tensor.nbytes for tensor in broadcast_job.state().values())
ONE_INDEX = broadcast_job.state()["i"].nbytes


@pytest.mark.parametrize(("reads", "times"), [("all", 4), ("broadcast", 1), ("per_node", 1), ("pairs", 2)])
def test_shared_data_is_read_once_per_group(read: list[dict[str, dict[str, int]]], reads: str, times: int) -> None:
    assert sum(rank[reads]["plain"] for rank in read) == times * STORED


@pytest.mark.parametrize(("reads", "times"), [("all", 4), ("broadcast", 1), ("pairs", 2)])
def test_each_process_reads_its_shards(read: list[dict[str, dict[str, int]]], reads: str, times: int) -> None:
    """Only tensor 'i' is not sharded. With "broadcast" it is read once, and sent to the other processes."""
    assert sum(rank[reads]["fsdp2"] for rank in read) == STORED - ONE_INDEX + times * ONE_INDEX


@pytest.mark.parametrize(("reads", "times"), [("all", 2), ("broadcast", 1)])
def test_replicas_of_shards_are_read_once(read: list[dict[str, dict[str, int]]], reads: str, times: int) -> None:
    sharded = STORED - ONE_INDEX
    expected = times * sharded + (4 if reads == "all" else 1) * ONE_INDEX
    nbytes = sum(rank[reads]["hsdp"] for rank in read)
    assert expected <= nbytes < expected + 64, "padding between two arrays is read together with them"
