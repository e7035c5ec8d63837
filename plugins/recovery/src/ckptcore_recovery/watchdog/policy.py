"""Policies: the actions of a monitor on a stall, their order, and how those are done that leave the monitor."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ckptcore.events import logger_named
from ckptcore.model import JSON
from ckptcore_recovery.watchdog.reports import StallReport

_LOGGER: Final = logger_named("ckptcore.watchdog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Log the report as a warning, by the logger ``ckptcore.watchdog`` of the training process.

    If its interpreter does not run, the monitor writes to the standard error of the process instead.

    Attributes:
        after: seconds after the stall was found.
    """

    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Webhook:
    """Post the report to a URL, as JSON: ``text`` has one line, which chat services show, and ``report`` all fields.

    Attributes:
        url: the URL, http or https. It is never logged, since such URLs are often secret.
        after: seconds after the stall was found.
        timeout: seconds to wait for the answer.

    Raises:
        ValueError: it is not a URL of http or https.
    """

    url: str = field(repr=False)
    after: float = field(default=0.0, kw_only=True)
    timeout: float = field(default=10.0, kw_only=True)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("Webhook(url): expected a URL that begins with http:// or https://")


@dataclass(frozen=True, slots=True)
class Command:
    """Run a program on the host of the stalled process, with the report as JSON on its standard input.

    Attributes:
        arguments: the program and its arguments; stored as a tuple. No shell is involved.
        after: seconds after the stall was found.
        timeout: seconds after which the program is killed.

    Raises:
        ValueError: there is no program.
    """

    arguments: Sequence[str]
    after: float = field(default=0.0, kw_only=True)
    timeout: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not self.arguments:
            raise ValueError(f"Command({self.arguments!r}): expected a sequence of the program and its arguments")
        object.__setattr__(self, "arguments", tuple(map(str, self.arguments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForSave:
    """Ask the job for a last save, as a preemption does: pass ``preemption_notice=watchdog.save_requested``.

    It saves at the next step that it reaches, if its save policy contains `PreemptionCheckpointing`.

    Attributes:
        after: seconds after the stall was found.
    """

    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """End the process, so that the launcher restarts the job: SIGTERM, and SIGKILL if it does not end.

    Once SIGTERM was sent, the process is killed even if the stall ends meanwhile.

    Attributes:
        after: seconds after the stall was found.
        grace: seconds between SIGTERM and SIGKILL.
    """

    after: float = 0.0
    grace: float = 30.0


Action: TypeAlias = Log | Webhook | Command | AskForSave | EndJob
"""An action on a stall. Actions that are not due when the stall ends are dropped."""

_ACTIONS: Final[Mapping[str, type[Any]]] = {
    action.__name__: action for action in (Log, Webhook, Command, AskForSave, EndJob)
}


def check_policy(policy: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions in the order in which they are due.

    Raises:
        TypeError: a member is no action.
        ValueError: a time is negative or not finite.
    """
    for action in policy:
        if not isinstance(action, tuple(_ACTIONS.values())):
            raise TypeError(f"policy=[{action!r}]: expected {', '.join(_ACTIONS)}")
        for name in ("after", "timeout", "grace"):
            seconds = getattr(action, name, 0.0)
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{type(action).__name__}({name}={seconds!r}): expected seconds of at least 0")
    return tuple(sorted(policy, key=lambda action: action.after))


def policy_to_json(policy: Sequence[Action]) -> list[JSON]:
    """Return the actions as JSON, with their secrets, for the monitor."""
    return [[type(action).__name__, dataclasses.asdict(action)] for action in policy]


def policy_from_json(document: Sequence[Any]) -> list[Action]:
    """Return the actions of `policy_to_json`."""
    return [_ACTIONS[name](**fields) for name, fields in document]


def _document(report: StallReport) -> bytes:
    return json.dumps({"text": str(report), "report": dataclasses.asdict(report)}).encode()


def post(webhook: Webhook, report: StallReport) -> None:
    """Post a report. Log an error without the URL, which may be secret."""
    import urllib.error  # only the monitor posts, and the import takes long
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """Makes a redirect an error: to follow it would drop the report, and could send it to another host."""

        def redirect_request(self, *arguments: Any) -> None:
            """See the base class."""

    request = urllib.request.Request(
        webhook.url, data=_document(report), headers={"Content-Type": "application/json"}, method="POST"
    )
    host = urllib.parse.urlsplit(webhook.url).hostname
    try:
        with urllib.request.build_opener(NoRedirects).open(request, timeout=webhook.timeout):
            pass
    except urllib.error.HTTPError as error:
        _LOGGER.warning("the report of a stall was not accepted by the webhook at %s: status %d", host, error.code)
    except Exception as error:  # noqa: BLE001  # libraries of HTTP raise errors of many types
        reason = type(getattr(error, "reason", error)).__name__  # its text may have the URL
        _LOGGER.warning("the report of a stall cannot be posted to the webhook at %s: %s", host, reason)


def run_command(command: Command, report: StallReport) -> None:
    """Run a program with a report on its standard input. Log how it failed."""
    name = command.arguments[0]
    try:
        ended = subprocess.run(
            command.arguments, input=_document(report), stdout=sys.stderr, timeout=command.timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it took longer than {command.timeout:.0f} s"
        _LOGGER.warning("the command %r about a stall failed: %s", name, reason)
        return
    if ended.returncode:
        _LOGGER.warning("the command %r about a stall ended with the status %d", name, ended.returncode)
