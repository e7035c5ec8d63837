"""Two hosts on this machine, which are network namespaces whose link has a limited rate."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class NetworkHost(NamedTuple):
    """A network namespace.

    Attributes:
        command: begins a command that runs in the namespace.
        address: its address.
        device: the name of its network device.
    """

    command: Sequence[str]
    address: str
    device: str


class NetworkUnavailableError(RuntimeError):
    """This process may not create network namespaces, or the system has none."""


@contextmanager
def limited_hosts(bytes_per_second: float) -> Iterator[Sequence[NetworkHost]]:
    """Create two hosts, and remove them at the end.

    Raises:
        NetworkUnavailableError: they cannot be created.
    """
    names = [f"ckptcore-{os.getpid()}-{letter}" for letter in "ab"]
    hosts = [
        NetworkHost(["ip", "netns", "exec", name], f"10.251.7.{number}", f"veth{number}")
        for number, name in enumerate(names, 1)
    ]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        link = ["ip", "link", "add", "veth1", "netns", names[0], "type", "veth", "peer", "name", "veth2"]
        _run(*link, "netns", names[1])
        for host in hosts:
            _run(*host.command, "ip", "link", "set", "lo", "up")
            _run(*host.command, "ip", "addr", "add", f"{host.address}/24", "dev", host.device)
            _run(*host.command, "ip", "link", "set", host.device, "up")
            rate = ["rate", f"{bytes_per_second * 8:.0f}bit", "burst", "256kb", "latency", "50ms"]
            _run(*host.command, "tc", "qdisc", "add", "dev", host.device, "root", "tbf", *rate)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NetworkUnavailableError(f"{command[0]} is not installed (package iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise NetworkUnavailableError(f"{' '.join(command)}: {error.stderr.strip()}") from error
