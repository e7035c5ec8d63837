"""The installed plugin."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from ckptcore_testing import PluginTests, SaveLoadMatrixTests, bit_patterns, installed_samples

from ckptcore.model import ArraySpec


class TestPlugin(PluginTests):
    entry_point = "jax"
    inner = ("worker_loads", "worker_saves", "worker_stages")


@pytest.mark.slow  # a subset, for work on this plugin alone; `tests/matrix` of the repository runs the whole matrix
class TestMatrix(SaveLoadMatrixTests):
    """The matrix with several JAX devices, and with arrays sharded over them."""

    def frameworks(self):
        return {
            name: sample for name, sample in installed_samples().frameworks.items() if name in ("numpy", "jax-sharded")
        }

    def storages(self):
        return {"memory": installed_samples().storages["memory"]}  # storages do not depend on the framework


def test_the_sample_is_sharded():
    sample = installed_samples().frameworks["jax-sharded"]
    assert len(sample.make(bit_patterns(ArraySpec((16, 2), "float32"))).sharding.device_set) == len(jax.devices()) > 1


def test_package_has_only_its_documented_names():
    import ckptcore_jax

    for name in ckptcore_jax.__all__:
        assert getattr(ckptcore_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        ckptcore_jax.nonsense  # noqa: B018  # the access itself is tested


def test_the_plugin_leaves_numpy_arrays_and_numbers_to_others():
    from ckptcore_jax.plugin import ckpt_container_handler, ckpt_leaf_handler

    for leaf in (np.zeros(2), np.float32(1), 1.5, "text"):
        assert ckpt_leaf_handler(type(leaf), leaf) is None
        assert ckpt_container_handler(type(leaf), leaf) is None


def test_the_examples_of_the_readme_run(tmp_path, monkeypatch):
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102  # the examples are part of this repository
    assert names["state"]["step"] == 3
    assert names["state"]["params"]["w"].sharding == names["sharded"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_3", "step_4"}
