"""Write files with the libraries that are installed, for `tools.strangers`.

    PYTHON tools/strangers_corpus.py DIRECTORY [LIBRARY ...]

It runs in any environment, also in one without ckptcore. In an environment with old releases it writes files of these
releases. Each library writes to ``DIRECTORY/LIBRARY-VERSION``. A library that is not installed is skipped; one that
fails is reported.
"""

# Many of the libraries are installed in only one environment, and many have no types.
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined,arg-type,misc,no-untyped-call"

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

WRITERS: Final[dict[str, Callable[[Path], None]]] = {}
"""Functions that write the files of a library, by the name of its distribution."""


def writes(library: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register the writer of a library."""

    def register(writer: Callable[[Path], None]) -> Callable[[Path], None]:
        WRITERS[library] = writer
        return writer

    return register


def model() -> Any:
    """A small module of PyTorch with buffers and a tied weight."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def trained() -> tuple[Any, Any, Any]:
    """A module after a step, with its optimizer and scheduler."""
    import torch

    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return module, optimizer, scheduler


@writes("torch")
def write_torch(to: Path) -> None:
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp

    module, optimizer, scheduler = trained()
    state = module.state_dict()
    torch.save(state, to / "state.pt")
    torch.save(state, to / "legacy.pth", _use_new_zipfile_serialization=False)
    torch.save(module, to / "module.pt")
    torch.save(module, to / "module_legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(optimizer.state_dict(), to / "optimizer.pt")
    torch.save(scheduler.state_dict(), to / "scheduler.pt")
    ema = torch.optim.swa_utils.AveragedModel(module)
    full = {
        "arch": "resnet",
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), name="x", nested=argparse.Namespace(a=[1])),
        "state_dict": state,
        "state_dict_ema": ema.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp_scaler": torch.amp.GradScaler("cpu").state_dict(),
        "metric": np.float64(0.25),
        "best": np.array([1, 2]),
        "history": collections.defaultdict(list, loss=[0.1, 0.2]),
        "counts": collections.Counter("aab"),
        "rng": torch.get_rng_state(),
    }
    torch.save(full, to / "timm_like.pth.tar")
    torch.save(full, to / "timm_like_legacy.pth.tar", _use_new_zipfile_serialization=False)
    torch.save({"args": None, "cfg": {"model": argparse.Namespace(layers=2)}, "model": state,
                "optimizer_history": [{"num_updates": 3, "lr_scheduler_state": {"best": None}}],
                "extra_state": {"epoch": 1, "val_loss": 2.5}}, to / "fairseq_like.pt")  # fmt: skip
    dtypes = [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ]
    torch.save({str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}, to / "dtypes.pt")
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"base": base, "row": base[1], "column": base[:, 2], "t": base.t(), "again": base,
                "empty": torch.zeros(0, 3), "scalar": torch.tensor(3), "expanded": torch.ones(1).expand(5)},
               to / "views.pt")  # fmt: skip
    torch.save(torch.ones(3), to / "tensor.pt")
    torch.save([torch.ones(2), 3, "x", None, (1.5, {4})], to / "list.pt")
    torch.save({1: 2, "a": b"bytes", (1, "k"): torch.zeros(1), None: 1}, to / "keys.pt")
    torch.save(torch.ones(3).to_sparse(), to / "sparse.pt")
    torch.save({"sparse": torch.ones(3).to_sparse(), "dense": torch.ones(3)}, to / "sparse_in_dict.pt")
    torch.save(list(range(3000)), to / "numbers.pt")
    torch.save(
        {"state": np.random.RandomState(0).get_state(), "python": __import__("random").getstate()}, to / "rng.pt"
    )
    with open(to / "protocol4.pt", "wb") as file:
        torch.save(state, file, pickle_protocol=4)
    torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, to / "quantized.pt")
    torch.jit.save(torch.jit.script(module.eval()), to / "script.pt")
    torch.jit.save(torch.jit.trace(module.eval(), torch.ones(2, 3)), to / "traced.pt")
    torch.export.save(torch.export.export(module.eval(), (torch.ones(2, 3),)), to / "exported.pt2")
    nested = {"model": state, "optim": optimizer.state_dict(), "step": 3, "lr": [0.1, 0.2], "np": np.arange(3)}
    dcp.save(nested, checkpoint_id=to / "dcp", no_dist=True)
    writer = dcp.FileSystemWriter(to / "dcp_one_file", single_file_per_rank=False)
    dcp.save({"w": torch.ones(400, 300), "b": torch.ones(3)}, storage_writer=writer, no_dist=True)
    (to / "bin").mkdir()
    torch.save({k: v for k, v in state.items() if k[0] == "0"}, to / "bin" / "pytorch_model-00001-of-00002.bin")
    torch.save({k: v for k, v in state.items() if k[0] != "0"}, to / "bin" / "pytorch_model-00002-of-00002.bin")
    files = {k: f"pytorch_model-0000{1 if k[0] == '0' else 2}-of-00002.bin" for k in state}
    (to / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@writes("safetensors")
def write_safetensors(to: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    dtypes = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"]
    save_file({name: np.ones((2, 3), name) for name in dtypes}, to / "dtypes.safetensors")
    save_file({"w": np.arange(3.0), "empty": np.zeros((0, 2)), "scalar": np.array(2)}, to / "model.safetensors",
              {"format": "np", "note": "ä"})  # fmt: skip
    save_file({}, to / "nothing.safetensors")
    write_broken(to / "broken")


@writes("numpy")
def write_numpy(to: Path) -> None:
    import numpy as np

    np.save(to / "array.npy", np.arange(6.0).reshape(2, 3))
    np.save(to / "fortran.npy", np.asfortranarray(np.arange(6).reshape(2, 3)))
    np.save(to / "object.npy", np.array({"a": 1}, object), allow_pickle=True)
    np.savez(to / "arrays.npz", a=np.arange(3), b=np.ones((2, 2), np.float32), name=np.array("x"))
    np.savez_compressed(to / "compressed.npz", a=np.zeros((50, 50)))
    for protocol in (0, 2, 4, 5):
        with open(to / f"protocol{protocol}.pkl", "wb") as file:
            pickle.dump({"w": np.arange(4.0), "s": np.float32(1.5), "l": [1, {"a": (2, None)}]}, file, protocol)
    np.savetxt(to / "text.txt", np.ones((2, 2)))


@writes("scikit-learn")
def write_sklearn(to: Path) -> None:
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    data = np.random.RandomState(0).rand(20, 3)
    with open(to / "scaler.pkl", "wb") as file:
        pickle.dump(StandardScaler().fit(data), file)
    with open(to / "classifier.pkl", "wb") as file:
        pickle.dump(LogisticRegression().fit(data, data[:, 0] > 0.5), file)


@writes("joblib")
def write_joblib(to: Path) -> None:
    import joblib
    import numpy as np

    joblib.dump({"w": np.arange(5.0), "n": 3}, to / "state.joblib")
    joblib.dump({"w": np.arange(5.0)}, to / "state_zlib.joblib.z", compress=3)
    joblib.dump({"w": np.arange(5.0)}, to / "state.joblib.gz", compress=("gzip", 3))


@writes("h5py")
def write_h5py(to: Path) -> None:
    import h5py
    import numpy as np

    with h5py.File(to / "arrays.h5", "w") as file:
        file["model/w"] = np.arange(6.0).reshape(2, 3)
        file.create_dataset("model/c", data=np.ones((10, 10)), chunks=(5, 5), compression="gzip")
        file.attrs["epoch"] = 3


@writes("keras")
def write_keras(to: Path) -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    network.compile("adam", "mse")
    network.save(to / "model.keras")
    network.save_weights(to / "model.weights.h5")
    network.save(to / "model.h5")


@writes("flax")
def write_flax(to: Path) -> None:
    import jax.numpy as jnp
    import numpy as np
    from flax import serialization
    from flax.training import checkpoints

    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3, jnp.bfloat16)}, "step": 3, "np": np.arange(2)}
    (to / "params.msgpack").write_bytes(serialization.to_bytes(params))
    (to / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize({"w": np.ones(3), "s": "text", "l": 1.5}))
    with suppress(ValueError):  # later releases need Orbax
        checkpoints.save_checkpoint(str(to.resolve() / "training"), params, step=5)


@writes("orbax-checkpoint")
def write_orbax(to: Path) -> None:
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp

    state = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "b": np.arange(3)}, "step": 3, "list": [jnp.ones(1), None]}
    root = to.resolve()
    ocp.PyTreeCheckpointer().save(str(root / "pytree"), state)
    with_options = getattr(ocp, "StandardCheckpointer", None)
    if with_options is not None:
        checkpointer = with_options()
        checkpointer.save(str(root / "standard"), {"w": jnp.ones((2, 2)), "n": jnp.array(3)})
        getattr(checkpointer, "wait_until_finished", lambda: None)()
    if hasattr(ocp, "args"):
        with ocp.CheckpointManager(str(root / "manager"), item_names=("state", "meta")) as manager:
            saved = ocp.args.StandardSave({"w": jnp.ones(4)})
            manager.save(1, args=ocp.args.Composite(state=saved, meta=ocp.args.JsonSave({"a": [1]})))
            manager.wait_until_finished()
    else:
        manager = ocp.CheckpointManager(str(root / "manager"), ocp.PyTreeCheckpointer())
        manager.save(1, state)
    if importlib.util.find_spec("orbax.checkpoint.v1") is not None:
        from orbax.checkpoint import v1

        v1.save_pytree(root / "v1", {"w": jnp.ones(4), "s": "text", "n": 5})
        v1.save_checkpointables(root / "v1_several", {"a": {"w": jnp.ones(4)}, "b": {"x": jnp.ones(2)}})


@writes("optax")
def write_optax(to: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    params = {"w": jnp.ones((2, 3))}
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    state = jax.tree_util.tree_map(np.asarray, {"params": params, "opt": opt})
    with open(to / "state.pkl", "wb") as file:
        pickle.dump(state, file)
    with open(to / "params.pkl", "wb") as file:
        pickle.dump(jax.tree_util.tree_map(np.asarray, params), file)


@writes("dm-haiku")
def write_haiku(to: Path) -> None:
    import haiku as hk
    import jax
    import jax.numpy as jnp
    import numpy as np

    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2])(x)))
    params = net.init(jax.random.PRNGKey(0), jnp.ones((1, 3)))
    with open(to / "params.pkl", "wb") as file:
        pickle.dump(jax.tree_util.tree_map(np.asarray, params), file)
    np.savez(to / "params.npz", **{f"{a}/{b}": np.asarray(c) for a, d in params.items() for b, c in d.items()})


@writes("equinox")
def write_equinox(to: Path) -> None:
    import equinox as eqx
    import jax

    eqx.tree_serialise_leaves(str(to / "mlp.eqx"), eqx.nn.MLP(2, 3, 4, 2, key=jax.random.PRNGKey(0)))


@writes("transformers")
def write_transformers(to: Path) -> None:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}
    LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=2)).save_pretrained(to / "llama")
    LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=2)).save_pretrained(to / "sharded", max_shard_size="2kB")
    BertModel(BertConfig(**small, num_hidden_layers=1)).save_pretrained(to / "bert")
    LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1)).half().save_pretrained(to / "half", variant="fp16")
    import torch
    from transformers import Trainer, TrainingArguments

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    rows = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(4)]
    arguments = TrainingArguments(str(to / "trainer"), max_steps=2, save_steps=2, report_to=[], use_cpu=True)
    Trainer(Regression(), arguments, train_dataset=rows).train()


@writes("peft")
def write_peft(to: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}
    base = LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1))
    lora = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    lora.save_pretrained(to / "lora")
    lora.save_pretrained(to / "lora_bin", safe_serialization=False)


@writes("accelerate")
def write_accelerate(to: Path) -> None:
    from accelerate import Accelerator

    module, optimizer, scheduler = trained()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(module, optimizer, scheduler)
    accelerator.save_state(str(to / "state"))
    accelerator.save_state(str(to / "state_bin"), safe_serialization=False)
    accelerator.save_model(prepared[0], str(to / "model"))


@writes("lightning")
def write_lightning(to: Path) -> None:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self, config: Any = None, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    try:
        from omegaconf import OmegaConf

        config = OmegaConf.create({"lr": 0.1, "layers": [1, 2], "name": "${lr}"})
    except ImportError:
        config = {"lr": 0.1}
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)))
    trainer = lightning.Trainer(default_root_dir=to / "run", max_epochs=1, accelerator="cpu", logger=False,
                                enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Module(config), rows)
    trainer.save_checkpoint(to / "model.ckpt")
    trainer.save_checkpoint(to / "weights.ckpt", weights_only=True)


@writes("sentence-transformers")
def write_sentence_transformers(to: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    small: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}
    (to / "base").mkdir()
    (to / "base" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]))
    BertModel(BertConfig(**small, num_hidden_layers=1)).save_pretrained(to / "base")
    BertTokenizerFast(str(to / "base" / "vocab.txt")).save_pretrained(to / "base")
    word = Transformer(str(to / "base"))
    SentenceTransformer(modules=[word, Pooling(8), Dense(8, 4)]).save(str(to / "model"))


@writes("deepspeed")
def write_deepspeed(to: Path) -> None:
    import torch

    module, optimizer, _ = trained()
    states = {
        "module": module.state_dict(),
        "optimizer": None,
        "global_steps": 3,
        "dp_world_size": 1,
        "ds_version": "0",
    }
    directory = to / "run" / "global_step3"
    directory.mkdir(parents=True)
    torch.save(states, directory / "mp_rank_00_model_states.pt")
    torch.save(
        {"optimizer_state_dict": optimizer.state_dict()}, directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    (to / "run" / "latest").write_text("global_step3")


@writes("diffusers")
def write_diffusers(to: Path) -> None:
    from diffusers import UNet2DModel

    blocks: dict[str, Any] = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(8, block_out_channels=(4, 4), norm_num_groups=2, layers_per_block=1, **blocks)
    unet.save_pretrained(to / "unet")
    unet.save_pretrained(to / "unet_bin", safe_serialization=False)


@writes("stable-baselines3")
def write_stable_baselines(to: Path) -> None:
    from stable_baselines3 import DQN, PPO

    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=4).save(to / "ppo")
    agent = DQN("MlpPolicy", "CartPole-v1", buffer_size=10)
    agent.save(to / "dqn.zip")
    agent.save_replay_buffer(to / "replay.pkl")


@writes("pytorch-ignite")
def write_ignite(to: Path) -> None:
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    module, optimizer, scheduler = trained()
    handler = Checkpoint(
        {"model": module, "optimizer": optimizer, "lr": scheduler}, DiskSaver(str(to), require_empty=False)
    )
    engine = Engine(lambda engine, batch: None)
    engine.run([0], max_epochs=1)
    handler(engine)


@writes("skorch")
def write_skorch(to: Path) -> None:
    import numpy as np
    import torch
    from skorch import NeuralNetRegressor

    net = NeuralNetRegressor(torch.nn.Linear(3, 1), max_epochs=1, verbose=0)
    net.fit(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))
    net.save_params(f_params=to / "params.pt", f_optimizer=to / "optimizer.pt", f_history=to / "history.json")
    net.save_params(f_params=to / "params.safetensors", use_safetensors=True)
    with open(to / "net.pkl", "wb") as file:
        pickle.dump(net, file)


@writes("pyro-ppl")
def write_pyro(to: Path) -> None:
    import pyro
    import torch

    pyro.param("loc", torch.ones(3))
    pyro.param("scale", torch.ones(3), constraint=torch.distributions.constraints.positive)
    pyro.get_param_store().save(str(to / "params.store"))


@writes("gpytorch")
def write_gpytorch(to: Path) -> None:
    import gpytorch
    import torch

    torch.save(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).state_dict(), to / "kernel.pth")


@writes("onnx")
def write_onnx(to: Path) -> None:
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    node = helper.make_node("Identity", ["w"], ["y"])
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [output], [weight])), str(to / "model.onnx"))


@writes("gguf")
def write_gguf(to: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(to / "model.gguf"), "llama")
    writer.add_tensor("w", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@writes("lightgbm")
def write_lightgbm(to: Path) -> None:
    import lightgbm
    import numpy as np

    data = lightgbm.Dataset(np.random.RandomState(0).rand(50, 3), label=np.arange(50) % 2)
    lightgbm.train({"verbose": -1, "num_leaves": 3}, data, 2).save_model(str(to / "model.txt"))


@writes("gensim")
def write_gensim(to: Path) -> None:
    from gensim.models import Word2Vec

    vectors = Word2Vec([["a", "b", "c"]] * 5, vector_size=4, min_count=1)
    vectors.save(str(to / "word2vec.model"))
    vectors.wv.save_word2vec_format(str(to / "vectors.bin"), binary=True)


@writes("pandas")
def write_pandas(to: Path) -> None:
    import pandas

    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    frame.to_pickle(to / "frame.pkl")
    frame.to_csv(to / "frame.csv")
    with suppress(ImportError):  # it needs pyarrow
        frame.to_parquet(to / "frame.parquet")


@writes("zarr")
def write_zarr(to: Path) -> None:
    import numpy as np
    import zarr

    group = zarr.open_group(str(to / "group.zarr"), mode="w")
    group["w"] = np.arange(6.0).reshape(2, 3)


@writes("numpyro")
def write_numpyro(to: Path) -> None:
    import jax
    import numpyro
    import numpyro.distributions as dist

    def program() -> None:
        numpyro.sample("x", dist.Normal(0, 1))

    kernel = numpyro.infer.MCMC(numpyro.infer.NUTS(program), num_warmup=2, num_samples=3, progress_bar=False)
    kernel.run(jax.random.PRNGKey(0))
    with open(to / "mcmc.pkl", "wb") as file:
        pickle.dump({name: __import__("numpy").asarray(value) for name, value in kernel.get_samples().items()}, file)


@writes("cloudpickle")
def write_cloudpickle(to: Path) -> None:
    import cloudpickle

    (to / "function.pkl").write_bytes(cloudpickle.dumps(lambda x: x + 1))


@writes("ray")
def write_ray(to: Path) -> None:
    import torch
    from ray.train import Checkpoint

    module, optimizer, _ = trained()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, to / "checkpoint.pt")
    Checkpoint.from_directory(str(to)).set_metadata({"epoch": 3})


@writes("torchtitan")
def write_torchtitan(to: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    module, optimizer, scheduler = trained()
    state = {**module.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(),
             "train_state": {"step": torch.tensor(3)}}  # fmt: skip
    dcp.save(state, checkpoint_id=to / "checkpoint" / "step-3", no_dist=True)


def write_broken(to: Path) -> None:
    """Write files that are not what their names say: pointers of Git LFS, pages, empty and truncated files."""
    import numpy as np
    from safetensors.numpy import save

    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 67108864\n"
    page = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
    whole = save({"w": np.arange(100.0)})
    for kind, data in {"pointer": pointer, "page": page, "empty": b"", "truncated": whole[:50]}.items():
        directory = to / kind
        for name in ("model.safetensors", "pytorch_model.bin", "model.pt", "model.ckpt", "params.msgpack", "model.h5",
                     "dcp/.metadata", "dcp/__0_0.distcp", "orbax/_METADATA", "orbax/manifest.ocdbt", "zarr/zarr.json",
                     "zarr2/.zarray", "own/checkpoint.json", "weights.npz", "state.pkl", "model.onnx", "model.gguf",
                     "sharded/model-00001-of-00002.safetensors"):  # fmt: skip
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        index = {"metadata": {}, "weight_map": names}
        (directory / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
        (directory / "sharded" / "model-00002-of-00002.safetensors").write_bytes(save({"b": np.ones(2)}))


def main() -> int:
    """Write the files. Return 1 if a library that is installed failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("libraries", nargs="*")
    options = parser.parse_args()
    failed = 0
    for library, writer in WRITERS.items():
        if options.libraries and library not in options.libraries:
            continue
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
        to = options.directory / f"{library}-{version}"
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        try:
            writer(to)
        except Exception:  # noqa: BLE001  # any error of a library: the others still write their files
            failed += 1
            print(f"{library} {version} failed:\n{traceback.format_exc(limit=-3)}", file=sys.stderr)
        else:
            print(f"{library} {version}: {sum(path.is_file() for path in to.rglob('*'))} files")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
