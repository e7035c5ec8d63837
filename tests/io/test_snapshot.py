"""Snapshots of a state: the writer takes copies while the caller waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from ckptcore.io.snapshot import CopiedSnapshot
from ckptcore.model import (
    LEAF,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    Node,
    Pending,
    TreeMetadata,
    WriteItem,
    WritePlan,
)

SPEC = ArraySpec((4,), "uint8")
TREE = TreeMetadata(Node("list", (0,), (LEAF,)), (ArrayRecord(SPEC),))
PLAN = WritePlan(TREE, (WriteItem(0, SPEC, (Box.whole(SPEC.shape),)),), 0, 1, "save")


def failed_copy(item: int) -> Sequence[Pending[HostArray]]:
    pending: Future[HostArray] = Future()
    pending.set_exception(RuntimeError("the device is gone"))
    return [pending]


def test_a_failed_copy_is_raised_even_after_the_writer_ended() -> None:
    snapshot = CopiedSnapshot(PLAN, failed_copy, lambda array: None)
    with pytest.raises(RuntimeError):
        snapshot.take(0)
    snapshot.end_writing()
    with pytest.raises(RuntimeError, match="device is gone"):
        snapshot.wait()


def test_the_caller_sees_no_copy_error_if_the_writer_failed_otherwise() -> None:
    snapshot = CopiedSnapshot(PLAN, failed_copy, lambda array: None)
    snapshot.end_writing()
    snapshot.wait()
