"""``ckptcore view``: shows a checkpoint or run in the browser, or writes a report."""

from __future__ import annotations

import gc
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, TypeVar

import click
from ckptcore_tools.cli.command import NAMED_HELP, ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import print_document, print_line, printable
from ckptcore_tools.cli.steps import step_names
from ckptcore_tools.outline import leaf_filter
from ckptcore_tools.policy_text import parse_preservation

from ckptcore_view.documents import BadRequestError
from ckptcore_view.report import write_report
from ckptcore_view.viewed import Viewed

T = TypeVar("T")

_GARBAGE_THRESHOLD: Final = 200_000
"""Number of new objects before a garbage collection. A tree of 100,000 arrays has about as many, but no garbage."""


@checkpoint_command("view", "Show a checkpoint, run or folder of runs in the browser.")
@click.argument("location")
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write a report to FILE; do not serve.")
@click.option("--compare", metavar="LOCATION", help="A checkpoint to compare with.")
@click.option("--policy", default="", metavar="POLICY", help="Show what a policy keeps; see `ckptcore gc --help`.")
@click.option(
    "--arrays", multiple=True, metavar="PATTERN",
    help="With --out: read these arrays for statistics, norms and differences. Repeatable. Default: all, if at most "
    "1 GB is read.",
)  # fmt: skip
@click.option("--named", metavar="EXAMPLE", help=NAMED_HELP)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the server. Default: a free one.")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the default browser.")
def command(
    as_json: bool,
    location: str,
    out: str | None,
    compare: str | None,
    policy: str,
    arrays: tuple[str, ...],
    named: str | None,
    port: int,
    open_browser: bool,
) -> ExitCode:
    """Show the checkpoint, run or runs at LOCATION: tree, arrays, files and timeline; metrics, events and steps.

    The page is served on 127.0.0.1 until the command is interrupted. Its URL has a secret token: everyone who knows the
    URL can read the checkpoint. An array is read when you select it. With --out, the page is one HTML file that needs
    no network.
    """
    context = command_context()
    names = step_names(named)
    if policy:
        _parsed(policy, parse_preservation, "--policy")
    for pattern in arrays:
        _parsed(pattern, leaf_filter, "--arrays")
    if out is None and arrays:
        raise click.UsageError("--arrays chooses the arrays of a report: add --out")
    if out is not None and (port or open_browser):
        raise click.UsageError("--out writes a report, and starts no server: leave out --port and --open")
    if out is not None:
        try:
            write_report(
                out,
                location,
                arrays=arrays or None,
                compare=compare,
                policy=policy,
                step_names=names,
                context=context,
            )
        except BadRequestError as error:
            raise click.UsageError(str(error)) from error
        if as_json:
            print_document("view", location=location, report=out)
        else:
            print_line(f"written: {printable(out)}")
        return ExitCode.OK
    from ckptcore_view.server import ViewServer  # a report needs no server

    viewed = Viewed(location, context, other=compare or "", step_names=names, policy=policy)
    if viewed.policy_error:
        raise click.UsageError(viewed.policy_error)
    server = ViewServer(viewed, port=port)
    if as_json:
        print_document("view", location=location, url=server.url)
    else:
        print_line(server.url)
    sys.stdout.flush()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    with _redirect(server.url) if open_browser else nullcontext():
        server.run()
    return ExitCode.OK


@contextmanager
def _redirect(url: str) -> Iterator[None]:
    """Open a URL in the browser through a file of this user, because other users can see program arguments."""
    with tempfile.NamedTemporaryFile("w", prefix="ckptcore-view-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><title>ckptcore view</title>')
        file.flush()
        webbrowser.open(f"file://{file.name}")
        yield


def _parsed(text: str, parse: Callable[[str], T], option: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error
