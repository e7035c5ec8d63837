"""A failed save deletes its objects, while another save commits.

The service throttles the first delete request. The retry comes after the commit.
"""

from __future__ import annotations

import numpy as np
import pytest
from ckptcore_s3.testing import DIALECT, S3Server
from ckptcore_testing import FaultProxy, HTTPAnswer, ProxiedRequest, Refusing

import ckptcore
from ckptcore.saving import writing

_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def test_a_concurrently_committed_checkpoint_is_kept(ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"s3://{ministack.create_bucket()}/run/step_1"
    context = ckptcore.Context(storage={"s3": ministack.options})
    throttled: list[ProxiedRequest] = []

    def throttle_while_another_saves(request: ProxiedRequest) -> HTTPAnswer | None:
        if throttled or "delete" not in request.query:
            return None
        throttled.append(request)
        ckptcore.save(location, {"w": np.ones(10)}, context=context)
        return HTTPAnswer.make(503, "Slow Down", "application/xml", _SLOW_DOWN)

    with FaultProxy(ministack.server.url, dialect=DIALECT) as proxy:

        def fail(*_: object) -> None:
            monkeypatch.undo()
            proxy.plan = Refusing(throttle_while_another_saves)
            raise RuntimeError("the save gives up when all is written")

        monkeypatch.setattr(writing, "timeline_to_json", fail)
        through_proxy = ckptcore.Context(storage={"s3": {**ministack.options, "endpoint": proxy.url}})
        with pytest.raises(RuntimeError, match="gives up"):
            ckptcore.save(location, {"w": np.zeros(10)}, context=through_proxy)
    assert throttled
    np.testing.assert_array_equal(ckptcore.load(location, context=context)["w"], np.ones(10))
