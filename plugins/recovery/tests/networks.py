"""Networks of a test: hosts as network namespaces on one bridge, or hosts that share the loopback interface."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

_RATE: Final = "400mbit"


class LoopbackNetwork:
    """Hosts that share the loopback interface of this machine. No link can be cut.

    Attributes:
        can_cut: True if links can be cut.
    """

    can_cut = False

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return "127.0.0.1"

    def namespace(self, host: int) -> Path | None:
        """Return the file of the network namespace of a host; None if it has none."""
        return None

    def cut(self, host: int) -> None:
        """Take the link of a host down."""
        raise NotImplementedError

    def drop(self, host: int, others: Iterable[int]) -> None:
        """Drop what a host sends to other hosts. What they send arrives."""
        raise NotImplementedError

    def heal(self) -> None:
        """Repair all links."""

    def close(self) -> None:
        """Remove the network."""


class BridgedNetwork(LoopbackNetwork):
    """Hosts that are network namespaces on one bridge. The link of each has a limited rate."""

    can_cut = True

    def __init__(self, hosts: int, rate: str = _RATE) -> None:
        """Create the bridge and the namespaces.

        Args:
            hosts: their number, at most 200.
            rate: the rate of each link, for `tc`.

        Raises:
            PermissionError: this process may not create them.
            FileNotFoundError: the programs ``ip`` and ``tc`` are missing.
        """
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise FileNotFoundError("the programs ip and tc of iproute2 are missing")
        self._hosts = hosts
        self._prefix = f"hosts{os.getpid():x}"
        self._cut: set[int] = set()
        self._dropped: set[tuple[int, int]] = set()
        try:
            _ip([f"link add {self._bridge} type bridge", f"link set {self._bridge} up"])
            for host in range(hosts):
                name, link = self._name(host), self._link(host)
                _ip(
                    [
                        f"netns add {name}",
                        f"link add {link} type veth peer name eth0 netns {name}",
                        f"link set {link} master {self._bridge} up",
                    ]
                )
                _ip([f"addr add {self.address(host)}/16 dev eth0", "link set lo up", "link set eth0 up"], name)
                limit = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
                _run(["tc", "-n", name, *limit])
        except PermissionError:
            self.close()
            raise

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}b"

    def _name(self, host: int) -> str:
        return f"{self._prefix}-{host}"

    def _link(self, host: int) -> str:
        return f"{self._prefix}v{host}"

    def address(self, host: int) -> str:
        """See `LoopbackNetwork`."""
        return f"10.117.0.{host + 1}"

    def namespace(self, host: int) -> Path | None:
        """See `LoopbackNetwork`."""
        return Path("/var/run/netns") / self._name(host)

    def cut(self, host: int) -> None:
        """See `LoopbackNetwork`."""
        _ip([f"link set {self._link(host)} down"])
        self._cut.add(host)

    def drop(self, host: int, others: Iterable[int]) -> None:
        """See `LoopbackNetwork`."""
        pairs = {(host, other) for other in others} - self._dropped
        _ip([f"route add blackhole {self.address(other)}" for _, other in pairs], self._name(host))
        self._dropped |= pairs

    def heal(self) -> None:
        """See `LoopbackNetwork`."""
        _ip([f"link set {self._link(host)} up" for host in self._cut])
        for host, other in self._dropped:
            _ip([f"route del blackhole {self.address(other)}"], self._name(host))
        self._cut.clear()
        self._dropped.clear()

    def close(self) -> None:
        """See `LoopbackNetwork`."""
        for host in range(self._hosts):
            if (namespace := self.namespace(host)) is not None and namespace.exists():
                _ip([f"netns del {self._name(host)}"])
        if Path(f"/sys/class/net/{self._bridge}").exists():
            _ip([f"link del {self._bridge}"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def enter(namespace: Path) -> None:
    """Move the calling thread, and the threads and processes that it starts, to a network namespace."""
    with namespace.open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _ip(commands: Sequence[str], namespace: str | None = None) -> None:
    if commands:
        _run(["ip", *([] if namespace is None else ["-n", namespace]), "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        kind = PermissionError if "not permitted" in done.stderr or "denied" in done.stderr else OSError
        raise kind(f"{' '.join(command)}: {text.strip()}: {done.stderr.strip()}")
