"""Retention of versions: whole chains, versions that followers have pinned, and what it costs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from ckptcore_testing.locations import new_place
from ckptcore_testing.trees import same_value
from ckptcore_versions.chains import WholeChains
from ckptcore_versions.version_directory import VERSION_NAMES

import ckptcore
from ckptcore.errors import CheckpointReferredError
from ckptcore.policies import LatestN, PreserveAll, StepInfo
from plugins.versions.tests.published import CONTEXT, load, location, present, publisher, weights


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new directory of versions."""
    return new_place(request.param, tmp_path)


def test_a_chain_is_kept_as_long_as_one_of_its_versions(place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen = []
    with publisher(place, keep=LatestN(2), full_every=4) as versions:
        for number in range(1, 11):
            versions.publish(number, weights(number))
            versions.wait()
            seen.append(present(place))
    # 1, 5 and 9 are full.
    assert seen[4] == [1, 2, 3, 4, 5]  # 4 and 5 are kept, and 4 needs 1 to 3
    assert seen[5] == [5, 6]
    assert seen[9] == [9, 10]
    assert not [record for record in caplog.records if "stays" in record.getMessage()]
    for number in (9, 10):
        assert same_value(load(place, number), weights(number))


def test_a_pinned_version_and_its_bases_stay_until_they_are_free(place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with publisher(place, keep=LatestN(1), full_every=3) as versions:
        versions.publish(1, weights(1))
        versions.publish(2, weights(2))
        versions.publish(3, weights(3))
        reader = ckptcore.CheckpointReader(place, step_names=VERSION_NAMES, context=CONTEXT)
        with reader.pin(2):
            for number in (4, 5, 6):
                versions.publish(number, weights(number))
                versions.wait()
                assert present(place) == [1, 2, *range(4, number + 1)]
            assert same_value(load(place, 2), weights(2))
            stays = [record.getMessage() for record in caplog.records if "stays" in record.getMessage()]
            assert len(stays) == 3 and all("step 2 " in message for message in stays)  # not also that 1 stays
        versions.publish(7, weights(7))
        versions.wait()
    assert present(place) == [7]


def test_the_base_of_a_version_cannot_be_deleted(place: str) -> None:
    with publisher(place) as versions:
        for number in (1, 2, 3):
            versions.publish(number, weights(number))
    for number in (1, 2):
        with pytest.raises(CheckpointReferredError, match=f"v00000{number + 1}"):
            ckptcore.delete(location(place, number))
    ckptcore.delete(location(place, 3))
    ckptcore.delete(location(place, 2))
    assert same_value(load(place, 1), weights(1))


def test_the_newest_version_is_kept_with_its_chain() -> None:
    """Retention never deletes the newest step, so its bases must stay even if the policy keeps nothing."""
    bases = {2: 1, 3: 2, 5: 4}
    policy = WholeChains(LatestN(0), bases.get)
    steps = [StepInfo(number, 0.0) for number in range(1, 6)]
    assert policy.keep(steps, 0.0) == {4, 5}
    assert policy.keep(steps[:3], 0.0) == {1, 2, 3}
    assert policy.keep([], 0.0) == frozenset()
    assert WholeChains(PreserveAll(), bases.get).keep(steps, 0.0) == {1, 2, 3, 4, 5}
    assert str(policy) == f"{LatestN(0)}, and the versions that these need"
