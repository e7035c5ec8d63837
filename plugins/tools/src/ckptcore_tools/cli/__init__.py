"""The ``ckptcore`` command: inspects, verifies, compares, copies and converts checkpoints, and deletes old steps.

- `application`: the group of commands, which are the entry points of the group ``ckptcore.commands``
- `inspect`, `ls`, `steps`, `verify`, `diff`, `copies`, `gc`, `plugins`: the commands
- `command`: exit codes, errors and options that all commands share
- `output`: text, JSON and progress bars; `treeview`: drawings of trees

Code that works without a terminal is in other modules of ``ckptcore_tools``, such as `ckptcore_tools.comparison`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with an `ExitCode`.

    Args:
        arguments: the arguments after the program's name. None: ``sys.argv[1:]``.
    """
    # Import late, so that modules of this package that do not need click can be imported without it.
    from ckptcore_tools.cli.application import application
    from ckptcore_tools.cli.command import ExitCode, discard_unwritable_output, system_text
    from ckptcore_tools.cli.output import error_line, prepare_streams

    prepare_streams()
    try:
        try:
            application.main(args=arguments, prog_name="ckptcore")
        finally:
            sys.stdout.flush()
    except OSError as error:  # the help, or the document of an error, cannot be written
        discard_unwritable_output()
        if error.errno == errno.EPIPE:
            sys.exit(ExitCode.BROKEN_PIPE)
        error_line(system_text(error))
        sys.exit(ExitCode.FAILED)
