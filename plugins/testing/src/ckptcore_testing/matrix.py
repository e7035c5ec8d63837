"""Tests of all combinations of installed frameworks, layouts and storages."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.hookspecs import PROJECT_NAME
from ckptcore.model import ArrayRecord, ArraySpec, HostArray, dtype_from_name
from ckptcore.plugins import installed_plugins
from ckptcore_testing.arrays import DTYPE_NAMES, PORTABLE_DTYPES, SHAPES, assert_same_bits, bit_patterns
from ckptcore_testing.covering import covering
from ckptcore_testing.samples import FrameworkSample, LayoutSample, Samples, StorageSample, installed_samples

_FAST: Final = ckptcore.Context(durability="none")


@cache
def _samples() -> Samples:
    return installed_samples()


class StorageMatrixTests:
    """Tests of combinations of frameworks, layouts and storages. Subclass it.

    Frameworks and storages come from the installed samples (see `ckptcore_testing.samples`), layouts from the installed
    plugins. Override `frameworks`, `layouts` and `storages` to test fewer of them.
    """

    def frameworks(self) -> Mapping[str, FrameworkSample]:
        """Return the frameworks by name."""
        return _samples().frameworks

    def layouts(self) -> Mapping[str, LayoutSample]:
        """Return the layouts that can save, by name."""
        known = _samples().layouts
        samples = [known.get(layout.name, LayoutSample(name=layout.name)) for layout in installed_plugins().layouts()]
        return {sample.name: sample for sample in samples if sample.saves}

    def storages(self) -> Mapping[str, StorageSample]:
        """Return the storages by scheme."""
        return _samples().storages

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise tests with a covering array of their arguments.

        Quick tests contain every pair of values of any two arguments. Costly storages are an exception: they are
        combined only with the first framework, but with all values of the other arguments. Slow tests contain every
        triple of values, or every combination with the option `--full`. If a `conftest.py` defines the option `--slow`,
        slow tests are generated only with this option.
        """
        frameworks, layouts, storages = self.frameworks(), self.layouts(), self.storages()
        containers = {
            f"{framework.name} {container.name}": container
            for framework in frameworks.values()
            for container in framework.containers
        }
        members: dict[str, Mapping[str, Any]] = {
            "saver": frameworks,
            "loader": frameworks,
            "layout": layouts,
            "storage": storages,
            "container": containers,
            "dtype": {name: name for name in DTYPE_NAMES},
        }
        taken = [name for name in members if name in metafunc.fixturenames]
        if not taken:
            return
        quick: set[tuple[str, ...]] = set()
        if metafunc.definition.get_closest_marker("slow") is None:
            cheap = {**members, "storage": [name for name, storage in storages.items() if not storage.costly]}
            first = list(frameworks)[:1]
            costly = {**members, "saver": first, "loader": first, "storage": [*storages.keys() - set(cheap["storage"])]}
            quick.update(covering(*(list(cheap[name]) for name in taken), strength=2))
            if "storage" in taken:
                quick.update(itertools.product(*(costly[name] for name in taken)))
        chosen = dict.fromkeys(sorted(quick))
        if metafunc.config.getoption("slow", True):
            strength = len(taken) if metafunc.config.getoption("full", False) else 3
            chosen |= dict.fromkeys(covering(*(list(members[name]) for name in taken), strength=strength))
        combinations = []
        for names in chosen:
            values = [members[name][choice] for name, choice in zip(taken, names, strict=True)]
            marks = [] if names in quick else [pytest.mark.slow]
            combinations.append(pytest.param(*values, id="-".join(names), marks=marks))
        metafunc.parametrize(taken, combinations)

    @pytest.fixture(autouse=True)
    def _sessions(self) -> Iterator[None]:
        """Apply the frameworks' settings for all dtypes."""
        with ExitStack() as stack:
            for framework in self.frameworks().values():
                stack.enter_context(framework.session())
            yield

    def test_there_are_samples_to_combine(self) -> None:
        assert self.frameworks() and self.layouts() and self.storages()

    # --- arrays

    def test_any_framework_loads_checkpoints_of_another(
        self,
        saver: FrameworkSample,
        loader: FrameworkSample,
        layout: LayoutSample,
        storage: StorageSample,
        tmp_path: Path,
    ) -> None:
        arrays = _arrays(_common_dtypes(saver, loader, layout))
        with storage.open(tmp_path) as location, _checkpoint(location, _make_arrays(saver, arrays), layout, storage):
            abstract = {
                dtype: [loader.abstract(ArraySpec(array.shape, dtype)) for array in shapes]
                for dtype, shapes in arrays.items()
            }
            loaded = ckptcore.load(location, abstract)
            for dtype, shapes in arrays.items():
                for leaf, expected in zip(loaded[dtype], shapes, strict=True):
                    assert isinstance(leaf, loader.array_type)
                    assert_same_bits(loader.elements(leaf), expected, f"{dtype} {expected.shape}")

    def test_any_framework_loads_in_place_from_checkpoints_of_another(
        self,
        saver: FrameworkSample,
        loader: FrameworkSample,
        layout: LayoutSample,
        storage: StorageSample,
        tmp_path: Path,
    ) -> None:
        arrays = _arrays(_common_dtypes(saver, loader, layout))
        with storage.open(tmp_path) as location, _checkpoint(location, _make_arrays(saver, arrays), layout, storage):
            target = {
                dtype: [loader.make(bit_patterns(ArraySpec(array.shape, dtype), 77)) for array in shapes]
                for dtype, shapes in arrays.items()
            }
            before = {dtype: list(shapes) for dtype, shapes in target.items()}
            assert ckptcore.load_into(location, target) is target
            for dtype, shapes in arrays.items():
                for leaf, old, expected in zip(target[dtype], before[dtype], shapes, strict=True):
                    assert isinstance(leaf, loader.array_type)
                    assert_same_bits(loader.elements(leaf), expected, f"{dtype} {expected.shape}")
                    if loader.fills:
                        assert leaf is old, "an array that can be filled must remain the same object"
                    else:
                        unchanged = bit_patterns(ArraySpec(expected.shape, dtype), 77)
                        assert_same_bits(loader.elements(old), unchanged, "an array that cannot be changed")

    def test_everything_loads_as_numpy_without_an_abstract_tree(
        self, saver: FrameworkSample, layout: LayoutSample, storage: StorageSample, tmp_path: Path
    ) -> None:
        arrays = _arrays(_common_dtypes(saver, saver, layout))
        with storage.open(tmp_path) as location, _checkpoint(location, _make_arrays(saver, arrays), layout, storage):
            for loaded in (ckptcore.load(location), ckptcore.load(location, ckptcore.metadata(location).abstract)):
                for dtype, shapes in arrays.items():
                    for leaf, expected in zip(loaded[dtype], shapes, strict=True):
                        assert_same_bits(np.asarray(leaf), expected, f"{dtype} {expected.shape}")

    def test_metadata_describes_the_checkpoint(
        self, saver: FrameworkSample, layout: LayoutSample, storage: StorageSample, tmp_path: Path
    ) -> None:
        arrays = _arrays(_common_dtypes(saver, saver, layout))
        custom = {"note": "matrix", "numbers": [1, 2.5, None]}
        with (
            storage.open(tmp_path) as location,
            _checkpoint(location, _make_arrays(saver, arrays), layout, storage, custom),
        ):
            metadata = ckptcore.metadata(location)
            assert metadata.layout == layout.name
            assert metadata.custom == custom
            specs = [record.spec for record in metadata.tree.leaves if isinstance(record, ArrayRecord)]
            assert specs == [ArraySpec(array.shape, dtype) for dtype, shapes in arrays.items() for array in shapes]
            report = ckptcore.verify(location)
            assert report.ok, report.problems

    def test_an_asynchronous_save_gives_the_same_checkpoint(
        self, saver: FrameworkSample, layout: LayoutSample, storage: StorageSample, tmp_path: Path
    ) -> None:
        arrays = _arrays(_common_dtypes(saver, saver, layout))
        with storage.open(tmp_path) as location:
            context = _context(storage)
            handle = ckptcore.save_async(location, _make_arrays(saver, arrays), layout=layout.name, context=context)
            try:
                handle.result(timeout=120)
                loaded = ckptcore.load_async(location).result(timeout=120)
                for dtype, shapes in arrays.items():
                    for leaf, expected in zip(loaded[dtype], shapes, strict=True):
                        assert_same_bits(np.asarray(leaf), expected, f"{dtype} {expected.shape}")
            finally:
                ckptcore.delete(location, context=context)

    def test_tied_arrays_stay_tied(
        self, saver: FrameworkSample, layout: LayoutSample, storage: StorageSample, tmp_path: Path
    ) -> None:
        elements = bit_patterns(ArraySpec((4, 3), "float32"))
        leaf = saver.make(elements)
        with storage.open(tmp_path) as location, _checkpoint(location, {"one": leaf, "two": [leaf]}, layout, storage):
            abstract = saver.abstract(ArraySpec((4, 3), "float32"))
            loaded = ckptcore.load(location, {"one": abstract, "two": [abstract]})
            assert_same_bits(saver.elements(loaded["one"]), elements, "one")
            assert_same_bits(saver.elements(loaded["two"][0]), elements, "two")


class SaveLoadMatrixTests(StorageMatrixTests):
    """Tests of combinations of frameworks and containers, in addition to `StorageMatrixTests`. Subclass it."""

    # --- the members

    def test_every_plugin_with_leaves_or_storages_takes_part(self) -> None:
        """A plugin without a sample would not be tested."""
        failed = installed_plugins().failed
        assert not failed, f"these plugins failed to load: {failed}"
        entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=PROJECT_NAME)}
        for plugin in installed_plugins().describe():
            distribution = entries[plugin.name].dist if plugin.name in entries else None
            # The samples of the built-in plugin are in this distribution.
            samples = _samples().offered.get("ckptcore-testing" if distribution is None else distribution.name, ())
            if "ckpt_leaf_handler" in plugin.hooks:
                frameworks = [sample for sample in samples if isinstance(sample, FrameworkSample)]
                assert frameworks, f"the plugin {plugin.name} handles leaves, but has no FrameworkSample"
            offered = {scheme for sample in samples if isinstance(sample, StorageSample) for scheme in sample.schemes}
            missing = set(plugin.storages) - offered
            assert not missing, f"the plugin {plugin.name} opens {sorted(missing)}, but has no StorageSample of them"
            assert offered or "ckpt_storage_for" not in plugin.hooks, (
                f"the plugin {plugin.name} offers no StorageSample"
            )

    # --- abstract values

    def test_a_value_loads_with_its_abstract_value(
        self, saver: FrameworkSample, container: Any, layout: LayoutSample, tmp_path: Path
    ) -> None:
        arrays = _arrays(_common_dtypes(saver, saver, layout))
        saved = container.make([_make_arrays(saver, arrays), {"step": 7, "name": "run", "nothing": None}])
        ckptcore.save(tmp_path / "checkpoint", saved, layout=layout.name, context=_FAST)
        abstract = ckptcore.abstract(saved)
        assert type(abstract) is type(saved)
        loaded = ckptcore.load(tmp_path / "checkpoint", abstract)
        assert type(loaded) is type(saved)
        leaves, values = container.children(loaded)
        assert values == {"step": 7, "name": "run", "nothing": None}
        for dtype, shapes in arrays.items():
            for leaf, expected in zip(leaves[dtype], shapes, strict=True):
                assert isinstance(leaf, saver.array_type)
                assert_same_bits(saver.elements(leaf), expected, f"{dtype} {expected.shape}")

    # --- dtypes that a framework lacks

    def test_an_unsupported_dtype_is_cast_correctly_or_refused(
        self, saver: FrameworkSample, loader: FrameworkSample, tmp_path: Path
    ) -> None:
        lacking = [name for name in saver.dtypes if name not in loader.dtypes]
        for number, dtype in enumerate(lacking):
            elements = bit_patterns(ArraySpec((6,), dtype))
            location = tmp_path / str(number)
            ckptcore.save(location, {"x": saver.make(elements)}, context=_FAST)
            assert_same_bits(ckptcore.load(location)["x"], elements, dtype)
            try:
                loaded = ckptcore.load(location, {"x": loader.abstract(ArraySpec((6,), "float32"))})["x"]
            except CheckpointError as error:
                assert dtype in str(error) or "x" in str(error), f"the error names neither array nor dtype: {error}"
                continue
            with np.errstate(all="ignore"):
                expected = elements.astype(np.float32)
            np.testing.assert_array_equal(loader.elements(loaded), expected, err_msg=f"a cast of {dtype}")

    # --- containers

    def test_any_container_can_contain_leaves_of_any_framework(
        self, saver: FrameworkSample, loader: FrameworkSample, container: Any, layout: LayoutSample, tmp_path: Path
    ) -> None:
        elements = [bit_patterns(ArraySpec((3, 2), "float32")), bit_patterns(ArraySpec((), "int32"))]
        location = str(tmp_path / "checkpoint")
        saved = container.make([saver.make(part) for part in elements])
        ckptcore.save(location, saved, layout=layout.name, context=_FAST)
        abstract = container.make(
            [loader.abstract(ArraySpec((3, 2), "float32")), loader.abstract(ArraySpec((), "int32"))]
        )
        loaded = ckptcore.load(location, abstract)
        assert type(loaded) is type(saved)
        for leaf, expected in zip(container.children(loaded), elements, strict=True):
            assert isinstance(leaf, loader.array_type)
            assert_same_bits(loader.elements(leaf), expected, container.name)
        leaves = [leaf for leaf in _leaves(ckptcore.load(location)) if isinstance(leaf, np.ndarray | np.generic)]
        for leaf, expected in zip(sorted(leaves, key=np.ndim, reverse=True), elements, strict=True):
            assert_same_bits(np.asarray(leaf), expected, f"{container.name} without an abstract tree")

    def test_containers_can_be_nested_in_each_other(
        self, saver: FrameworkSample, layout: LayoutSample, tmp_path: Path
    ) -> None:
        containers = [container for framework in self.frameworks().values() for container in framework.containers]
        elements = bit_patterns(ArraySpec((2,), "int16"))
        state, abstract = {}, {}
        for outer, inner in itertools.product(containers, repeat=2):
            name = f"{outer.name} of {inner.name}"
            pair = [saver.make(elements), saver.make(elements)]
            wanted = [saver.abstract(ArraySpec((2,), "int16"))] * 2
            state[name] = outer.make([inner.make(pair), 3])
            abstract[name] = outer.make([inner.make(wanted), 0])
        ckptcore.save(tmp_path / "checkpoint", state, layout=layout.name, context=_FAST)
        loaded = ckptcore.load(tmp_path / "checkpoint", abstract)
        for outer, inner in itertools.product(containers, repeat=2):
            name = f"{outer.name} of {inner.name}"
            assert type(loaded[name]) is type(state[name])
            made, number = outer.children(loaded[name])
            assert number == 3
            for leaf in inner.children(made):
                assert_same_bits(saver.elements(leaf), elements, name)

    # --- all combinations

    @pytest.mark.slow
    def test_any_combination_of_samples_works(
        self,
        saver: FrameworkSample,
        loader: FrameworkSample,
        layout: LayoutSample,
        storage: StorageSample,
        dtype: str,
        tmp_path: Path,
    ) -> None:
        """Each dtype in each container, with any frameworks, layout and storage."""
        if dtype not in _common_dtypes(saver, loader, layout):
            assert dtype not in PORTABLE_DTYPES or dtype not in loader.dtypes or dtype not in saver.dtypes
            return
        spec = ArraySpec((5,), dtype)
        elements = bit_patterns(spec)
        containers = [container for framework in self.frameworks().values() for container in framework.containers]
        state = {
            container.name: container.make([saver.make(elements), saver.make(elements)]) for container in containers
        }
        with storage.open(tmp_path) as location, _checkpoint(location, state, layout, storage):
            abstract = {
                container.name: container.make([loader.abstract(spec), loader.abstract(spec)])
                for container in containers
            }
            loaded = ckptcore.load(location, abstract)
            for container in containers:
                assert type(loaded[container.name]) is type(state[container.name])
                for leaf in container.children(loaded[container.name]):
                    assert_same_bits(loader.elements(leaf), elements, f"{dtype} in {container.name}")


def _common_dtypes(saver: FrameworkSample, loader: FrameworkSample, layout: LayoutSample) -> list[str]:
    common = [
        name
        for name in DTYPE_NAMES
        if name in saver.dtypes and name in loader.dtypes and name not in layout.refused_dtypes
    ]
    assert "float32" in common, "every framework and layout must support float32"
    for name in common:
        dtype_from_name(name)
    return common


def _arrays(dtypes: list[str]) -> dict[str, list[HostArray]]:
    return {dtype: [bit_patterns(ArraySpec(shape, dtype)) for shape in SHAPES] for dtype in dtypes}


def _make_arrays(saver: FrameworkSample, arrays: Mapping[str, list[HostArray]]) -> dict[str, list[Any]]:
    return {dtype: [saver.make(array) for array in shapes] for dtype, shapes in arrays.items()}


def _context(storage: StorageSample) -> ckptcore.Context:
    return replace(_FAST, io=replace(_FAST.io, without_conditions=storage.without_conditions))


@contextmanager
def _checkpoint(
    location: str,
    state: object,
    layout: LayoutSample,
    storage: StorageSample,
    custom: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Save a checkpoint. Delete it at the end of the context, because the storage may outlive the test."""
    context = _context(storage)
    ckptcore.save(location, state, layout=layout.name, metadata=custom, context=context)
    try:
        yield
    finally:
        ckptcore.delete(location, context=context)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for child in tree:
            yield from _leaves(child)
    else:
        yield tree
