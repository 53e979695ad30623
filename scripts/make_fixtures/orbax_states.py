"""Checkpoints of Orbax, as JAX, Flax and MaxText save them.

usage: python orbax_states.py      (orbax-checkpoint 0.12.8, jax 0.10.2, optax 0.2.8, tensorstore 0.1.86)

`orbax/` has one training state in several layouts, its arrays sharded over a mesh of 2 x 2 devices of a CPU, and
`expected.safetensors`, which has what the state held. `two_processes/` was saved by two of them. `edges_*` and
`zeros/` are written by tensorstore alone: chunks that reach beyond their arrays or are not stored, and trees of several levels.
"""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
if "process" not in sys.argv:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates/fsdp-ckpt/tests/fixtures"
# Orbax writes the path into `commit_success.txt`, so it is the same everywhere.
FOLDER = pathlib.Path("/tmp/orbax")
NAMES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "int32": "I32",
    "int64": "I64", "uint32": "U32", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def save_expected(path, tree):
    """What a tree holds, by names joined by dots, as a safetensors file (whose library has no bfloat16 of numpy)."""
    header, data = {}, b""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, str):
            continue
        array = np.asarray(leaf)
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))) for key in keys)
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def sharded(array, *axes):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def training_state():
    """Parameters in nested dicts and a list, AdamW's moments and count, and values of other kinds."""
    key = jax.random.split(jax.random.key(7), 4)
    params = {
        "embed": sharded(jax.random.normal(key[0], (64, 48)), "fsdp", "tensor"),
        "layers": [
            {"kernel": sharded(jax.random.normal(key[1], (20, 24), jnp.bfloat16), None, ("fsdp", "tensor"))},
            {"kernel": sharded(jax.random.normal(key[2], (4, 8, 10)), "tensor", None, "fsdp")},
        ],
        "norm": {"scale": sharded(jnp.ones(20))},
    }
    optimizer = optax.adamw(1e-3)
    opt_state = optimizer.init(params)
    grads = jax.tree.map(lambda x: (x * 0.5 + 0.25).astype(x.dtype), params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    others = {
        "half": jnp.arange(5, dtype=jnp.float16), "small": jnp.arange(-3, 4, dtype=jnp.int8),
        "bytes": jnp.arange(9, dtype=jnp.uint8), "flags": jnp.array([True, False, True]),
        "words": jnp.arange(6, dtype=jnp.uint32), "float8": jnp.arange(8, dtype=jnp.float8_e4m3fn),
        "host": np.arange(7, dtype=np.int64).reshape(7, 1), "zeros": jnp.zeros((2, 3)),
    }  # fmt: skip
    return {"step": 1, "rate": 0.125, "params": params, "opt_state": opt_state, "others": others,
            "name": "tiny", "nothing": None, "empty": {}}  # fmt: skip


def save_layouts(state):
    for name, options in [
        ("ocdbt_zarr2", {}),
        ("ocdbt_zarr3", {"use_zarr3": True}),
        ("files_zarr2", {"use_ocdbt": False}),
        ("files_zarr3", {"use_ocdbt": False, "use_zarr3": True}),
    ]:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            saved = state if "ocdbt" in name else {key: state[key] for key in ["params", "rate", "name"]}
            # Chunks smaller than the shards of devices.
            small = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1600), saved)
            checkpointer.save(FOLDER / name, args=ocp.args.PyTreeSave(saved, save_args=small))
    arrays = {"params": state["params"], "opt_state": state["opt_state"], "step": np.int32(1)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(FOLDER / "standard", arrays)
    with ocp.CheckpointManager(FOLDER / "manager") as manager:
        manager.save(1, args=ocp.args.StandardSave(arrays))
    with ocp.CheckpointManager(FOLDER / "items", item_names=("params", "opt_state", "notes")) as manager:
        parts = {
            "params": ocp.args.StandardSave(state["params"]),
            "opt_state": ocp.args.StandardSave(state["opt_state"]),
            "notes": ocp.args.JsonSave({"tokens": 17}),
        }
        manager.save(1, args=ocp.args.Composite(**parts))
    save_expected(FOLDER / "expected.safetensors", state)


def save_arrays(folder, arrays, version, chunks, shards, stores_zeros=True):
    """Arrays in a tree of several levels, by TensorStore, with metadata in Orbax's form."""
    config = {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 40}
    for name, array in arrays.items():
        base = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"params.{name}/", "config": config}
        if version == 2:
            zstd = {"id": "zstd", "level": 1}
            metadata = {"chunks": chunks[name], "compressor": zstd, "dimension_separator": "."}
        else:
            codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]
            inner = {"chunk_shape": chunks[name], "codecs": codecs}
            grid = {"name": "regular", "configuration": {"chunk_shape": shards[name]}}
            metadata = {"chunk_grid": grid, "codecs": [{"name": "sharding_indexed", "configuration": inner}]}
        spec = {"driver": "zarr" if version == 2 else "zarr3", "kvstore": base, "metadata": metadata}
        spec["store_data_equal_to_fill_value"] = stores_zeros
        store = ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result()
        store.write(array).result()
    entries = {
        f"('params', '{name}')": {
            "key_metadata": [{"key": "params", "key_type": 2}, {"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in arrays
    }
    text = {"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": version == 3}
    if stores_zeros:
        text["store_array_data_equal_to_fill_value"] = True
    (folder / "_METADATA").write_text(json.dumps(text))


def save_edges():
    """Arrays whose last chunks reach beyond them."""
    rng = np.random.default_rng(3)
    arrays = {"a": rng.normal(size=(7, 10)).astype("f4"), "b": rng.normal(size=(5, 3, 4)).astype("f2"),
              "c": rng.integers(-99, 99, size=11).astype("i4")}  # fmt: skip
    chunks = {"a": [3, 4], "b": [2, 2, 3], "c": [4]}
    shards = {"a": [6, 8], "b": [4, 2, 6], "c": [8]}
    for version in [2, 3]:
        save_arrays(FOLDER / f"edges_zarr{version}", arrays, version, chunks, shards)
    save_expected(FOLDER / "edges.safetensors", {"params": arrays})


def save_zeros():
    """Arrays of whose chunks and shards some are not stored, as Orbax did until `store_array_data_equal_to_fill_value`."""
    arrays = {"a": np.zeros((8, 8), "f4"), "b": np.zeros(9, "i4")}
    arrays["a"][5, 1:7] = 1.5
    chunks, shards = {"a": [2, 2], "b": [3]}, {"a": [4, 4], "b": [9]}
    save_arrays(FOLDER / "zeros", arrays, 3, chunks, shards, stores_zeros=False)
    save_expected(FOLDER / "zeros.safetensors", {"params": arrays})


def save_uncommitted():
    """A save whose process ends before the folder gets its name. Runs in a process of its own."""
    from orbax.checkpoint._src.path import atomicity

    async def end(*_):
        os._exit(0)

    atomicity.AtomicRenameTemporaryPath.finalize = end
    with ocp.CheckpointManager(FOLDER / "uncommitted") as manager:
        manager.save(2, args=ocp.args.StandardSave({"params": {"w": jnp.arange(6.0)}}))


def save_as_process(number):
    """One of two processes with two devices each."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize("localhost:29471", num_processes=2, process_id=number)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    rng, wholes, tree = np.random.default_rng(5), {}, {}
    for name, shape, axes in [("a", (64, 40), ("fsdp", "tensor")), ("b", (6, 4), ("tensor",)), ("c", (5,), ())]:
        whole = wholes[name] = rng.normal(size=shape).astype(np.float32)
        tree[name] = jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(*axes)), whole.__getitem__)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(FOLDER / "two_processes", {"params": tree})
    if number == 0:
        save_expected(FOLDER / "two_processes.safetensors", {"params": wholes})


if __name__ == "__main__":
    if sys.argv[1:] == ["uncommitted"]:
        save_uncommitted()
    elif sys.argv[1:2] == ["process"]:
        save_as_process(int(sys.argv[2]))
    else:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        save_layouts(training_state())
        save_edges()
        save_zeros()
        subprocess.run([sys.executable, __file__, "uncommitted"], check=True)
        processes = [subprocess.Popen([sys.executable, __file__, "process", str(number)]) for number in range(2)]
        assert [process.wait() for process in processes] == [0, 0]
        shutil.rmtree(FIXTURES / FOLDER.name, ignore_errors=True)
        shutil.move(FOLDER, FIXTURES)
