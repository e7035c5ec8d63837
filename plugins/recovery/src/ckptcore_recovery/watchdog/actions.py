"""Actions that leave the host or start a program: posting a report to a webhook, and running a command."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Final

from ckptcore.events import logger_named
from ckptcore_recovery.watchdog.policy import Command, Webhook
from ckptcore_recovery.watchdog.reports import StallReport

_LOGGER: Final = logger_named("ckptcore.watchdog")


def _document(report: StallReport) -> bytes:
    return json.dumps({"text": str(report), "report": dataclasses.asdict(report)}).encode()


def post(webhook: Webhook, report: StallReport) -> None:
    """Post a report. Log an error without the URL, which may be secret."""
    request = urllib.request.Request(
        webhook.url, data=_document(report), headers={"Content-Type": "application/json"}, method="POST"
    )
    host = urllib.parse.urlsplit(webhook.url).hostname
    try:
        with urllib.request.urlopen(request, timeout=webhook.timeout):
            pass
    except urllib.error.HTTPError as error:
        _LOGGER.warning("the report of a stall was not accepted by the webhook at %s: status %d", host, error.code)
    except Exception as error:  # noqa: BLE001  # libraries of HTTP raise errors of many types
        reason = type(getattr(error, "reason", error)).__name__  # its text may have the URL
        _LOGGER.warning("the report of a stall cannot be posted to the webhook at %s: %s", host, reason)


def run(command: Command, report: StallReport) -> None:
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
