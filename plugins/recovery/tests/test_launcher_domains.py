"""Failure domains that the launcher names, and when they are used."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ckptcore_recovery.peers import joining
from ckptcore_recovery.peers.discovery import Server
from ckptcore_recovery.peers.joining import MemoryOptions, members_in_domains
from ckptcore_recovery.peers.launcher_domains import launcher_domain
from ckptcore_recovery.peers.views import Member

from plugins.recovery.tests.job_hosts import Hosts


def slurm(address: str, pattern: str) -> Mapping[str, str]:
    return {"SLURM_JOB_ID": "1", "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}


@pytest.mark.parametrize(
    ("environment", "domain"),
    [
        ({}, None),
        ({"MEGASCALE_SLICE_ID": "0", "MEGASCALE_NUM_SLICES": "2"}, "slice 0"),
        ({"MEGASCALE_SLICE_ID": ""}, None),
        (slurm("root_switch.CELL1.iswi1r4s0c1l1.belenos386", "switch.switch.switch.node"), "switch iswi1r4s0c1l1"),
        (slurm("s[0-2].s1.node5", "switch.switch.node"), "switch s1"),
        (slurm("s0.s[4-5].tux1", "switch.switch.node"), "switch s[4-5]"),
        (slurm("leaf.node5.cluster.example.org", "switch.node"), "switch leaf"),
        (slurm("b8.tux1", "block.node"), "block b8"),
        (slurm("tc1", "node"), None),  # Slurm without a topology
        (slurm("a:0:1:2.tux1", "torus:x:y:z.node"), None),
        (slurm("tux1", "switch.node"), None),
        (slurm(".tux1", "switch.node"), None),
        (slurm("s1.s2", "switch.switch"), None),
        (slurm("", ""), None),
        ({"SLURM_TOPOLOGY_ADDR": "s1.tux1"}, None),
        ({"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, None),
        ({"MEGASCALE_SLICE_ID": "3", **slurm("s1.tux1", "switch.node")}, "slice 3"),
    ],
)
def test_variables_of_launchers(environment: Mapping[str, str], domain: str | None) -> None:
    assert launcher_domain(environment) == domain


def servers(*offered: str | None, given: str = "") -> Sequence[Server]:
    """Return servers of hosts. `given` has the names of the hosts whose user passed a domain."""
    names = [f"h{number}" for number in range(len(offered))]
    return [
        Server(Member(name, "127.0.0.1", 1, "rack" if name in given.split() else name), 0, 0, 0, b"", domain)
        for name, domain in zip(names, offered, strict=True)
    ]


@pytest.mark.parametrize(
    ("reported", "wanted", "domains"),
    [
        (servers(None, None), 2, ["h0", "h1"]),
        (servers("s1", "s1", "s2", "s2"), 2, ["s1", "s1", "s2", "s2"]),
        (servers("s1", "s1", "s2", "s2"), 3, ["h0", "h1", "h2", "h3"]),  # too few
        (servers("s1", "s1", "s1"), 2, ["h0", "h1", "h2"]),
        (servers("s1", "s1", "s2", None), 2, ["s1", "s1", "s2", "h3"]),
        (servers("s1", "s1", "s1", "s1", "s2"), 2, ["h0", "h1", "h2", "h3", "h4"]),  # h4 would hold five parts
        (servers("s1", "s1", "s2"), 2, ["s1", "s1", "s2"]),  # h2 holds three parts instead of two
        (servers(None, "s1", "s2", None, given="h0 h3"), 2, ["rack", "s1", "s2", "rack"]),
    ],
)
def test_domains_of_the_launcher_are_used_if_there_are_enough(
    reported: Sequence[Server], wanted: int, domains: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptcore.recovery")
    assert [member.domain for member in members_in_domains(reported, wanted)] == domains
    offers = any(server.offered for server in reported)
    chosen = "those of the launcher" if set(domains) & {"s1", "s2"} else "each host"
    assert [record.getMessage().split(";")[0].split(": ")[1] for record in caplog.records] == [chosen] * offers


@pytest.mark.parametrize("given", [None, "rack"])
def test_a_job_uses_the_domains_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Each host takes part with its own environment. A domain of the user counts more."""
    hosts = Hosts(tmp_path, MemoryOptions(1 << 20))
    environments = iter([slurm(f"s{switch}.tux", "switch.node") for switch in (1, 1, 2, 2)])
    monkeypatch.setattr(joining, "launcher_domain", lambda environment: launcher_domain(next(environments)))
    try:
        view = hosts.join(*"abcd", domains={} if given is None else dict.fromkeys("abcd", given))[0].view
        domains = sorted(member.domain for member in view.members)
        if given is not None:
            assert domains == ["rack"] * 4
            return
        assert domains == ["switch s1", "switch s1", "switch s2", "switch s2"]
        for member in view.members:
            assert len({view.by_id[name].domain for name in view.holders(member.id)}) == 2
    finally:
        hosts.close()
