"""Conformance tests for connections between processes and memory servers: the protocol of another transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import xxhash


class ChannelTests:
    """Tests of `ckptcore_recovery.peers.messages.Channel`, for implementations to inherit.

    Implement `connect`.

    Attributes:
        piece_bytes: the maximum bytes of a payload.
        block_bytes: the bytes of a block, which has a checksum.
    """

    piece_bytes = 1 << 22
    block_bytes = 1 << 20

    def connect(self) -> AbstractContextManager[tuple[Any, Any]]:
        """Return both sides of a new connection, that of the client first. Close them at the end of the block."""
        raise NotImplementedError

    def test_messages_arrive_in_order_on_both_sides(self) -> None:
        """Headers are JSON. Payloads may be empty; others have a checksum of each block in the header."""
        sent: list[tuple[Mapping[str, Any], bytes]] = [
            ({"op": "first", "number": 1 << 60, "nested": [None, True, {"name": "\u00e9\ud800"}]}, b"payload"),
            ({}, b""),
            ({"op": "last"}, bytes(range(256))),
        ]
        with self.connect() as (client, server):
            for sender, receiver in ((client, server), (server, client), (client, server)):
                for header, payload in sent:
                    sender.send(header, payload)
                for header, payload in sent:
                    received, data = receiver.receive()
                    assert {name: received[name] for name in header} == header
                    assert bytes(data) == payload
                    assert received.get("checksums") == ([xxhash.xxh3_64_intdigest(payload)] if payload else None)

    def test_the_largest_payload_goes_into_the_memory_that_the_receiver_chose(self) -> None:
        """The sender may change its memory once it has sent it."""
        with self.connect() as (client, server):
            buffer = bytearray(self.piece_bytes)
            asked: list[tuple[Mapping[str, Any], int]] = []

            def place(header: Mapping[str, Any], nbytes: int) -> Iterator[memoryview]:
                asked.append((header, nbytes))
                for start in range(0, nbytes, self.block_bytes):
                    block = memoryview(buffer)[start : start + self.block_bytes]
                    yield block
                    assert bytes(block) == b"\x5a" * len(block)  # it has arrived when the next one is asked for

            def send() -> None:
                memory = bytearray(b"\x5a" * self.piece_bytes)
                client.send({"op": "piece"}, memoryview(memory))
                memory[:] = bytes(self.piece_bytes)
                client.send({"op": "none"})

            sender = threading.Thread(target=send)
            sender.start()
            _, data = server.receive(place)
            _, nothing = server.receive(place)
            sender.join()
            assert [(header["op"], nbytes) for header, nbytes in asked] == [("piece", self.piece_bytes)]
            assert bytes(buffer) == b"\x5a" * self.piece_bytes
            assert not len(data) and not len(nothing)

    def test_a_payload_goes_into_new_memory_if_the_receiver_chooses_none(self) -> None:
        """The receiver may choose by the header."""
        with self.connect() as (client, server):
            client.send({"op": "piece"}, b"payload")
            assert bytes(server.receive(lambda header, nbytes: None)[1]) == b"payload"

    def test_a_payload_that_does_not_have_its_checksums_is_refused(self) -> None:
        """The checksums of the sender are those of the memory that the payload was written to."""
        with self.connect() as (client, server):
            client.send({"op": "read", "checksums": [xxhash.xxh3_64_intdigest(b"payload")]}, b"Payload")
            with pytest.raises(OSError):  # or an error that is one
                server.receive()

    @pytest.mark.parametrize("part", ["header", "payload"])
    def test_a_message_that_is_too_large_is_refused_and_the_next_one_arrives(self, part: str) -> None:
        """Nothing of it is sent."""
        with self.connect() as (client, server):
            header, payload = ({"x": "x" * (1 << 20)}, b"") if part == "header" else ({}, bytes(self.piece_bytes + 1))
            with pytest.raises(ValueError, match="large"):
                client.send(header, payload)
            client.send({"op": "next"})
            assert server.receive()[0]["op"] == "next"

    @pytest.mark.parametrize("closing", ["own side", "other side"])
    def test_a_receiver_gets_an_error_when_the_connection_is_closed(self, closing: str) -> None:
        """Also if it waits already, and on the other side."""
        with self.connect() as (client, server):
            errors: list[OSError] = []
            waits = threading.Event()

            def receive() -> None:
                waits.set()
                try:
                    client.receive()
                except OSError as error:
                    errors.append(error)

            receiver = threading.Thread(target=receive)
            receiver.start()
            waits.wait()
            (client if closing == "own side" else server).close()
            receiver.join()
            assert len(errors) == 1
            with pytest.raises(OSError):  # any error of a connection
                client.send({})
                client.receive()
            client.close()  # again

    def test_a_receiver_does_not_wait_longer_than_it_was_told(self) -> None:
        """Without a limit it waits until a message arrives."""
        with self.connect() as (client, server):
            client.set_timeout(0.01)
            with pytest.raises(OSError):  # any error of a connection
                client.receive()
        with self.connect() as (client, server):
            client.set_timeout(0.01)
            client.set_timeout(None)
            server.send({"op": "answer"})
            assert client.receive()[0]["op"] == "answer"
