"""``ckptcore plugins``: lists installed plugins, and plugins that failed to load."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore import plugins as core_plugins
from ckptcore.installed import version_of
from ckptcore.plugins import FailedPlugin, PluginInfo
from ckptcore_tools.cli.command import ExitCode, checkpoint_command
from ckptcore_tools.cli.output import print_document, print_line, printable, to_json

_OFFERS = {
    "ckpt_leaf_handler": "leaves",
    "ckpt_container_handler": "containers",
    "ckpt_checkpointable_handler": "checkpointables",
    "ckpt_coordinator": "a coordinator",
    "ckpt_executor": "an executor",
    "ckpt_storage_for": "locations with other URL schemes",
}


@checkpoint_command("plugins", "List the installed plugins.")
def command(as_json: bool) -> ExitCode:
    """List the installed plugins with their handlers, layouts and URL schemes.

    Plugins that failed to load, and layouts that cannot be used, are listed with the reason. If there are any, the
    exit code is 1.
    """
    installed = core_plugins.installed_plugins()
    plugins, version = installed.describe(), version_of("ckptcore")
    if as_json:
        documents = [
            {name: value for name, value in to_json(plugin).items() if value or name != "failed_layouts"}
            for plugin in plugins
        ]
        print_document("plugins", version=version, plugins=documents, failed=list(installed.failed))
    else:
        _print(version, plugins, installed.failed)
    broken = installed.failed or any(plugin.failed_layouts for plugin in plugins)
    return ExitCode.FOUND if broken else ExitCode.OK


def _print(version: str, plugins: Sequence[PluginInfo], broken: Sequence[FailedPlugin]) -> None:
    print_line(("ckptcore ", "bold"), version)
    for plugin in plugins:
        print_line((plugin.name, "bold cyan"), "  ", (plugin.distribution, "dim"))
        handled = [what for hook, what in _OFFERS.items() if hook in plugin.hooks]
        for title, offered in (
            ("handles", handled),
            ("layouts", plugin.layouts),
            ("storages", [f"{scheme}://" for scheme in plugin.storages]),
        ):
            if offered:
                print_line(f"  {title:<9}", ", ".join(offered))
        for name, reason in plugin.failed_layouts.items():
            print_line("  ", (f"{printable(name)} cannot be used", "red"), f": {printable(reason)}")
    for failed in broken:
        print_line((failed.name, "bold red"), "  ", (failed.distribution, "dim"))
        print_line("  ", ("failed to load", "red"), f": {printable(failed.reason)}")
