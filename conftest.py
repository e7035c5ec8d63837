"""Settings of every test run: environment variables before any import, slow tests, system tests, garbage collection."""

from __future__ import annotations

import faulthandler
import gc
import inspect
import multiprocessing
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

# JAX reads these when it first makes a backend: 8 virtual devices, so that sharded arrays exist without an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# No test may use a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# PyTorch asks name servers for the name of 127.0.0.1 at each connection to a store. If a server drops a request, the
# connection waits one second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# gcsfs reads this when it is imported. Without it gcsfs repeats requests that no test server answers.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

# Ray sends no statistics of its use. The token of its clusters is in the environment, or Ray would write one into the
# home directory.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# "ci" tries the same few examples in every run; "thorough" is for `--slow`; "explore" searches for new ones
# (HYPOTHESIS_PROFILE=explore). A test sets its own number of examples only if these are expensive.
settings.register_profile("ci", max_examples=25, derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=200)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


_SYSTEM: Final = frozenset(
    {
        "examples",
        "plugins/ray_coordinator/tests",
        "plugins/storage_s3/tests",
        "plugins/view/tests/page",
        "tests/controller",
        "tests/crashes",
        "tests/examples",
        "tests/jobs",
        "tests/launchers",
        "tests/object_stores",
        "tests/resume",
        "tests/servers",
        "tests/toy_plugins",
    }
)
"""Directories of tests that start processes or servers, relative to the repository."""

_COMBINATIONS: Final = frozenset(
    {
        "plugins/collective/tests/test_shared_adjustments.py",
        "plugins/formats/tests/test_conversions.py",
        "plugins/incremental/tests/partial/test_crashes.py",
        "plugins/incremental/tests/partial/test_hostile_sessions.py",
        "plugins/incremental/tests/partial/test_lost_answers.py",
        "plugins/incremental/tests/partial/test_simultaneous.py",
        "plugins/incremental/tests/updates/test_interleavings.py",
        "plugins/incremental/tests/updates/test_updates.py",
        "plugins/jax_backend/tests/test_equal_values.py",
        "plugins/jax_backend/tests/test_jax_keys.py",
        "plugins/jax_backend/tests/test_jax_settings.py",
        "plugins/jax_backend/tests/test_nnx_modules.py",
        "plugins/layout_dcp/tests/test_exploits.py",
        "plugins/layout_dcp/tests/test_items.py",
        "plugins/layout_dcp/tests/test_ours_loads_torch.py",
        "plugins/layout_dcp/tests/test_resharding.py",
        "plugins/layout_dcp/tests/test_torch_loads_ours.py",
        "plugins/layout_dcp/tests/test_weaknesses_of_torch.py",
        "plugins/layout_dcp/tests/test_without_torch.py",
        "plugins/layout_dcp/tests/test_zips.py",
        "plugins/layout_orbax/tests/test_conversions.py",
        "plugins/layout_orbax/tests/test_damage.py",
        "plugins/layout_orbax/tests/test_encoding.py",
        "plugins/layout_orbax/tests/test_handlers.py",
        "plugins/layout_orbax/tests/test_hostile_checkpoints.py",
        "plugins/layout_orbax/tests/test_layouts.py",
        "plugins/layout_orbax/tests/test_orbax_containers.py",
        "plugins/layout_orbax/tests/test_orbax_loads_ours.py",
        "plugins/layout_orbax/tests/test_orbax_matching.py",
        "plugins/layout_orbax/tests/test_ours_loads_orbax.py",
        "plugins/layout_orbax/tests/test_weaknesses_of_orbax.py",
        "plugins/layout_orbax/tests/test_zarr_arrays.py",
        "plugins/tiers/tests/test_orders.py",
        "plugins/tools/tests/copying/test_interrupted_copies.py",
        "plugins/torch_backend/tests/test_named_optimizers.py",
        "plugins/torch_backend/tests/test_optimizer_classes.py",
        "plugins/torch_backend/tests/test_optimizer_matrix.py",
        "plugins/torch_backend/tests/test_optimizer_parts.py",
        "plugins/torch_backend/tests/test_parameter_order.py",
        "plugins/torch_backend/tests/test_peft_models.py",
        "plugins/torch_backend/tests/test_scheduler_matrix.py",
        "plugins/transforms/tests/test_quantized.py",
        "tests/benchmarks/test_benchmarks.py",
        "tests/checkpointer/test_busy.py",
        "tests/checkpointer/test_unusual_runs.py",
        "tests/composites/test_jobs.py",
        "tests/conformance/test_kit_notices.py",
        "tests/consistent_reads/test_every_moment.py",
        "tests/consistent_reads/test_polling.py",
        "tests/corruption/test_budgets.py",
        "tests/corruption/test_damage.py",
        "tests/corruption/test_hostile_composites.py",
        "tests/corruption/test_special_files.py",
        "tests/crashes/test_faults.py",
        "tests/crashes/test_kill_at_each_call.py",
        "tests/crashes/test_other_files.py",
        "tests/crashes/test_power_loss.py",
        "tests/crashes/test_ranks.py",
        "tests/crashes/test_sync_order.py",
        "tests/crashes/test_system_calls.py",
        "tests/foreign/test_resharding.py",
        "tests/fuzzing/test_seeds.py",
        "tests/jobs/test_simulated_jobs.py",
        "tests/loading/test_adjustments.py",
        "tests/loading/test_loop_values.py",
        "tests/matrix/test_any_tree.py",
        "tests/matrix/test_matrix.py",
        "tests/object_stores/test_closed_features.py",
        "tests/object_stores/test_expiring_credentials.py",
        "tests/object_stores/test_kill_at_each_request.py",
        "tests/object_stores/test_one_commit.py",
        "tests/object_stores/test_refusals.py",
        "tests/open_checkpoints/test_iter_boxes.py",
        "tests/resume/test_bit_exact.py",
        "tests/servers/test_layout_crashes.py",
        "tests/servers/test_matrix.py",
        "tests/stateful/test_grain.py",
        "tests/stateful/test_in_place.py",
        "tests/storage/test_file_systems.py",
        "tests/storage/test_passing_faults.py",
        "tests/toy_plugins/test_toy_plugins.py",
        "tests/transforms/test_maxtext.py",
        "tests/transforms/test_scanned.py",
    }
)
"""Files whose tests have many parameters: products of a few kinds, or each starts a process, runs a crash or compiles.
See `_not_sampled`."""

_EVERY: Final = 6
"""One of this many parameters of a test in `_COMBINATIONS` is tried without `--slow`."""

_LONGEST_SECONDS: Final = 1200
"""A quick test that runs longer hangs. The longest ones take 30, and most end their processes after at most 300."""

_STDERR = pytest.StashKey[int]()
"""Descriptor of stderr, which pytest redirects during tests."""

_TRAINERS: Final = [
    Path(__file__).parent / "plugins/integrations/tests" / name for name in ("engines", "trainers", "vllm")
]
"""Tests with libraries that only the environments of `make test-engines`, `make test-integrations` and `make test-vllm`
have."""

_PRELOADED: Final = [
    "ckptcore_testing",
    "ckptcore_orbax",
    "ckptcore_jax.collectives",
    "ckptcore_torch.store_coordinator",
    "jax",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # which optimizers and sharded models import, in a second
]
"""Modules that start nothing when they are imported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`, `--full` and `--trainers`."""
    parser.addoption("--slow", action="store_true", help="collect the tests marked slow, too")
    parser.addoption("--full", action="store_true", help="run slow tests of more than a minute in full; with --slow")
    parser.addoption("--trainers", action="store_true", help="collect tests with libraries that train or serve")


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """True if slow tests run in full. Otherwise each tries a part, so that all slow tests together take two hours."""
    return bool(pytestconfig.getoption("full"))


def pytest_configure(config: pytest.Config) -> None:
    """Try more examples with `--slow`. Let the processes that tests fork begin with the frameworks imported.

    A test process has one server of forks, which imports only what the first test asks for.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    config.stash[_STDERR] = os.dup(2)
    if config.getoption("slow") and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("thorough")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the directories of system tests if these are deselected: some import large libraries."""
    if collection_path in _TRAINERS and not config.getoption("trainers"):
        return True
    without = config.getoption("markexpr") == "not system" and collection_path.is_dir()
    return True if without and _in_system(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item | pytest.Collector] | None:
    """Generate no tests of functions, classes and modules marked slow without `--slow`: there are thousands."""
    if collector.config.getoption("slow") or not (inspect.isfunction(obj) or inspect.isclass(obj)):
        return None
    marks = getattr(obj, "pytestmark", [])
    slow = collector.get_closest_marker("slow") or any(mark.name == "slow" for mark in marks)
    return [] if slow else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the system tests. Deselect single parameters that are marked slow without `--slow`."""
    directories = {directory: _in_system(directory) for directory in {item.path.parent for item in items}}
    for item in items:
        if directories[item.path.parent]:
            item.add_marker("system")
    if not config.getoption("slow"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        if not config.option.collectonly and not any("::" in argument for argument in config.args):
            left_out.extend(_not_sampled(items))
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            out = set(left_out)
            items[:] = [item for item in items if item not in out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """If a quick test hangs, write the stacks of all threads and end this process. pytest-xdist then fails the test.

    This works also if the test holds the lock of the interpreter. Of pytest's own options, `faulthandler_timeout` would
    end slow tests, too, and the lowest version has no `faulthandler_exit_on_timeout`.
    """
    if item.config.getoption("slow") or item.config.getoption("trainers"):
        return (yield)
    faulthandler.dump_traceback_later(_LONGEST_SECONDS, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _not_sampled(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield five of six parameters of the tests in `_COMBINATIONS`, in each run the same ones. The first one stays.

    By a hash of the name: with every sixth one, a parameter of three values would always have the same value.
    """
    files = {Path(__file__).parent / file for file in _COMBINATIONS}
    tried: set[str] = set()
    for item in items:
        if item.path not in files or item.get_closest_marker("slow"):
            continue
        name = item.nodeid.partition("[")[0]
        if name in tried and zlib.crc32(item.nodeid.encode()) % _EVERY:
            yield item
        tried.add(name)


def _in_system(directory: Path) -> bool:
    here = Path(__file__).parent
    if not directory.is_relative_to(here):
        return False
    relative = directory.relative_to(here)
    return any(str(place) in _SYSTEM for place in (relative, *relative.parents))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules and collected tests from later garbage collections.

    Each test process imports every framework and holds every test: millions of objects that live until it ends, and
    that each `gc.collect` of a test would traverse. Without them a full collection takes 1 ms instead of 500 ms.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _keep()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _keep_what_came() -> Iterator[None]:
    """The same for what the tests of a file import, and for what libraries remember of them."""
    yield
    _keep()


def _keep() -> None:
    gc.collect()
    gc.freeze()
