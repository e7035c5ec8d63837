"""A trainer that publishes until it is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import ckptcore
from ckptcore.commit import locks
from ckptcore.model import JSON
from plugins.versions.tests.published import publisher, weights
from plugins.versions.tests.watched_deltas import WatchedDeltas
from tests.ownership.fake_clock import FakeClock

_PATIENCE_SECONDS = 240.0


def train_until_killed(place: str, storage: Mapping[str, Mapping[str, JSON]], draw: random.Random) -> int:
    """Run a trainer in a process of its own, and kill it at a random event. Return the number of events.

    Args:
        place: the directory of versions.
        storage: options of the storage.
        draw: random numbers.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(place, storage, sender, draw.random()))
    process.start()
    sender.close()
    events = draw.randrange(2, 40)
    try:
        for _ in range(events):
            assert receiver.poll(_PATIENCE_SECONDS), "the trainer does not publish"
            receiver.recv_bytes()
    finally:
        process.kill()
        process.join()
        receiver.close()
    return events


def _train(place: str, storage: Mapping[str, Mapping[str, JSON]], events: Connection, seed: float) -> None:
    # The earlier trainer is dead, so its lease need not be awaited in real time.
    clock: Any = FakeClock()
    vars(locks)["SYSTEM_CLOCK"] = clock
    draw = random.Random(seed)

    def tell(what: str) -> None:
        events.send_bytes(what.encode())

    context = ckptcore.Context(durability="none", storage=storage)
    layout = WatchedDeltas(taking=tell)
    with publisher(place, layout=layout, context=context, if_in_use="take over", full_every=5) as versions:
        number = (versions.latest or 0) + 1
        while True:
            versions.publish(number, weights(number), background=draw.random() < 0.5)
            tell("published")
            number += 1
    os._exit(0)
