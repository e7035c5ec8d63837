"""``ckptcore plugins``: what is installed, and what failed to load and why."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import print_document, print_line, printable
from ckptcore_tools.cli.documents import PluginDocument, PluginsDocument
from ckptcore_tools.cli.exits import ExitCode

if TYPE_CHECKING:
    from ckptcore.plugins import PluginInfo

__all__ = ["command"]

_OFFERS = {
    "ckpt_leaf_handler": "leaves",
    "ckpt_container_handler": "containers",
    "ckpt_checkpointable_handler": "checkpointables",
    "ckpt_coordinator": "a coordinator",
    "ckpt_executor": "an executor",
    "ckpt_storage_for": "locations of schemes that no plugin names",
}


@checkpoint_command("plugins")
def command(as_json: bool) -> ExitCode:
    """List the installed plugins: what each one handles, its layouts and URL schemes.

    Those that failed to load, and layouts that cannot be used, are listed with the reason, and make the exit code 1.
    """
    document = _document()
    if as_json:
        print_document(document)
    else:
        _print(document)
    broken = document["failed"] or any("failed_layouts" in plugin for plugin in document["plugins"])
    return ExitCode.FOUND if broken else ExitCode.OK


def _document() -> PluginsDocument:
    from ckptcore.plugins import installed_plugins

    installed = installed_plugins()
    return {
        "schema": "ckptcore.plugins/1",
        "version": importlib.metadata.version("ckptcore"),
        "plugins": [_plugin_document(plugin) for plugin in installed.describe()],
        "failed": [
            {"name": plugin.name, "distribution": plugin.distribution, "reason": plugin.reason}
            for plugin in installed.failed
        ],
    }


def _plugin_document(plugin: PluginInfo) -> PluginDocument:
    document: PluginDocument = {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "hooks": list(plugin.hooks),
        "layouts": list(plugin.layouts),
        "storages": list(plugin.storages),
    }
    if plugin.failed_layouts:
        document["failed_layouts"] = dict(plugin.failed_layouts)
    return document


def _print(document: PluginsDocument) -> None:
    print_line(("ckptcore ", "bold"), document["version"])
    for plugin in document["plugins"]:
        print_line((plugin["name"], "bold cyan"), "  ", (plugin["distribution"], "dim"))
        handled = [what for hook, what in _OFFERS.items() if hook in plugin["hooks"]]
        for title, offered in (
            ("handles", handled),
            ("layouts", plugin["layouts"]),
            ("storages", [f"{scheme}://" for scheme in plugin["storages"]]),
        ):
            if offered:
                print_line(f"  {title:<9}", ", ".join(offered))
        for name, reason in plugin.get("failed_layouts", {}).items():
            print_line("  ", (f"{printable(name)} cannot be used", "red"), f": {printable(reason)}")
    for failed in document["failed"]:
        print_line((failed["name"], "bold red"), "  ", (failed["distribution"], "dim"))
        print_line("  ", ("failed to load", "red"), f": {printable(failed['reason'])}")
