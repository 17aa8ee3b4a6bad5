"""Reads T5X checkpoints without T5X: msgpack for the tree, TensorStore for the arrays.

Names are T5X's with dots, shapes come from the file. Two layouts are known: one sub-tree per layer
(``encoder.layers_0.…``), and the scanned one of scalable_t5 (``encoder.encoder.…``, layers axis
second, attention kernels with a heads axis of their own). Optimizer slots are never opened.

Checkpoints lie in a local folder or on ``gs://``; there the small files are read through epath (which
needs gcsfs or TensorFlow), the arrays by TensorStore itself.
"""

import contextlib
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from etils import epath
from flax import serialization, traverse_util
from jaxtyping import PyTree

from specjax.checkpoints import place, structure
from specjax.models.t5 import T5, T5Config

# Version 2 wrote bfloat16 as uint16; before that the file was of another kind.
_VERSIONS = (2, 3)
# Chunks kept decoded while a checkpoint is read: the parts of several devices, and the layers of a
# scanned tensor, lie in the same ones.
CACHE_BYTES = 2 * 2**30
_SCANNED = ("encoder.encoder.", "decoder.decoder.")


def find(path: str | os.PathLike) -> epath.Path:
    """The checkpoint directory that a path means.

    Args:
      path: a checkpoint directory, its ``checkpoint`` file, or a model directory, of which the
        newest ``checkpoint_N`` is taken; local or ``gs://``.

    Returns:
      The directory that holds the file ``checkpoint``.

    Raises:
      ValueError: there is none, or it cannot be reached.
    """
    folder = _located(path)
    with _reached(folder):
        if folder.name == "checkpoint" and folder.is_file():
            return folder.parent
        if (folder / "checkpoint").is_file():
            return folder
        # An unfinished save is called checkpoint_N.tmp-…
        steps = {
            int(match[1]): child
            for child in (folder.iterdir() if folder.is_dir() else ())
            if (match := re.fullmatch(r"checkpoint_(\d+)", child.name))
            and (child / "checkpoint").is_file()
        }
    if not steps:
        raise ValueError(f"no T5X checkpoint (a file 'checkpoint', or checkpoint_N/) in {folder}")
    return steps[max(steps)]


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All parameters as they are stored, without conversion.

    Args:
      path: see `find`.

    Returns:
      Dotted T5X name to array.

    Raises:
      ValueError: no checkpoint, or tensors without data (all named).
    """
    folder = find(path)
    leaves = _target(folder)
    tensors, absent = _open(folder, leaves)
    if absent:
        raise ValueError(f"{folder} is incomplete; no readable data: {', '.join(sorted(absent))}")
    return _fetch(folder, tensors)


def load(
    path: str | os.PathLike, model: T5, dtype=jnp.float32, shardings: PyTree | None = None
) -> PyTree:
    """Parameters for ``model``, transposed to ``[out, in]``.

    Each leaf goes straight to its devices; of a sharded one only the chunks that a device's part
    touches are read for it.

    Args:
      path: see `find`.
      model: its configuration must fit the file.
      dtype: type of the parameters returned.
      shardings: see `place.targets`.

    Returns:
      The tree that ``model.abstract(dtype)`` describes.

    Raises:
      ValueError: no checkpoint, or missing, unexpected, misshapen tensors or tensors without data;
        all of them are named, and no array is read before this is known.
    """
    wanted = place.targets(model, dtype, shardings)
    folder = find(path)
    leaves = _target(folder)
    tensors, absent = _open(folder, leaves)
    structure.check(
        _shapes(leaves, tensors), _expected(model), str(folder), no_readable_data=absent
    )
    views: dict[str, Any] = {}
    for name, x in tensors.items():
        views |= _layers(name, x)
    reads = {_our_name(name): _reader(name, x) for name, x in views.items()}
    called = {_our_name(name): name for name in views}
    return place.tree(reads, wanted, called, str(folder))


def infer_config(path: str | os.PathLike) -> T5Config:
    """The configuration, as far as names and shapes tell it; no array is read.

    What they do not tell is taken from T5: tanh-GELU in a gated layer (v1.1), ReLU otherwise
    (v1.0), bucket distance 128, epsilon 1e-6.

    Args:
      path: see `find`.

    Returns:
      The configuration, with float32 activations.

    Raises:
      ValueError: no checkpoint, or not one of an encoder-decoder T5.
    """
    folder = find(path)
    leaves = _target(folder)
    found = _shapes(leaves, _open(folder, leaves)[0])
    shared = "decoder.relpos_bias.rel_embedding" in found
    bias = "relpos_bias" if shared else "layers_0.relpos_bias"
    gated = "encoder.layers_0.mlp.wi_0.kernel" in found
    try:
        vocab_size, emb_dim = found["token_embedder.embedding"]
        num_heads, buckets = found[f"decoder.{bias}.rel_embedding"]
        joined = found["encoder.layers_0.attention.query.kernel"][1]
        mlp_dim = found["encoder.layers_0.mlp.wo.kernel"][0]
    except KeyError as error:
        raise ValueError(f"{folder} is no T5 encoder-decoder: it has no {error}") from None
    return T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=joined // num_heads,
        mlp_dim=mlp_dim,
        num_encoder_layers=_depth(found, "encoder"),
        num_decoder_layers=_depth(found, "decoder"),
        mlp_activations=("gelu", "linear") if gated else ("relu",),
        logits_via_embedding="decoder.logits_dense.kernel" not in found,
        shared_relative_bias=shared,
        relative_buckets=buckets,
    )


def unroll(tensors: dict[str, Any]) -> dict[str, Any]:
    """The unscanned layout with two-dimensional kernels; arrays become views.

    Args:
      tensors: name to array (or tracer), in either layout.

    Returns:
      Name to array, one sub-tree per layer.
    """
    out = {}
    for name, x in tensors.items():
        out |= {name: _join_heads(name, x) for name, x in _layers(name, x).items()}
    return out


def _layers(name: str, x: Any) -> dict[str, Any]:
    """One view per layer of a scanned tensor (or of a TensorStore, where nothing is read yet)."""
    if not (name.startswith(_SCANNED) and x.ndim > 1):
        return {name: x}
    stack, _, inner = name.split(".", 2)
    return {f"{stack}.layers_{i}.{inner}": x[:, i] for i in range(x.shape[1])}


def _join_heads(name: str, x: Any) -> Any:
    """``[embed, heads, head_dim]`` to ``[embed, joined]``; of ``out`` the first two axes."""
    match = re.search(r"attention\.(query|key|value|out)\.kernel$", name)
    if match is None or x.ndim != 3:
        return x
    return x.reshape(-1, x.shape[2]) if match[1] == "out" else x.reshape(x.shape[0], -1)


def _reader(name: str, x: Any) -> place.Read:
    """How to read a part of a tensor in our layout; ``x`` is an array or an open TensorStore."""
    if not name.endswith(".kernel"):
        return lambda index: _values(x[index])
    if x.ndim == 2:
        return lambda index: _values(x[index[::-1]]).T
    return lambda index: _read_heads(name, x, index[::-1]).T


def _read_heads(name: str, x: Any, index: tuple[slice, slice]) -> np.ndarray:
    """A part of the joined kernel: as few whole heads as cover it, then the rest is cut off."""
    axis = 0 if name.endswith(".out.kernel") else 1  # which of the two is joined
    heads, width = (x.shape[0], x.shape[1]) if axis == 0 else (x.shape[1], x.shape[2])
    start, stop, _ = index[axis].indices(heads * width)
    first, last = start // width, -(-stop // width)
    part = x[first:last, :, index[1]] if axis == 0 else x[index[0], first:last]
    cut = slice(start - first * width, stop - first * width)
    joined = _join_heads(name, _values(part))
    return joined[cut] if axis == 0 else joined[:, cut]


def _values(x: Any) -> np.ndarray:
    x = x.read().result() if isinstance(x, ts.TensorStore) else np.asarray(x)
    return x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x


def _located(path: str | os.PathLike) -> epath.Path:
    text = os.fspath(path)
    if text.startswith("gs://"):
        return epath.Path(text)
    if "://" in text:
        raise ValueError(f"{text}: only local folders and gs:// can be read; copy it there first")
    return epath.Path(text).expanduser().resolve()


@contextlib.contextmanager
def _reached(folder: epath.Path) -> Iterator[None]:
    """What a remote file system raises, as one line: its libraries share no class of errors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or not _is_remote(folder):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"cannot read {folder}: {type(error).__name__}: {reason}") from error


def _is_remote(folder: str | os.PathLike) -> bool:
    return os.fspath(folder).startswith("gs://")


def _target(folder: epath.Path) -> dict[str, Any]:
    """Name to array or TensorStore spec, from the file ``checkpoint``."""
    with _reached(folder):
        content = (folder / "checkpoint").read_bytes()
    try:
        contents = serialization.msgpack_restore(content)
        version, target = contents["version"], contents["optimizer"]["target"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'checkpoint'} is not T5X's: {error!r}") from None
    if version not in _VERSIONS:
        raise ValueError(f"{folder} has version {version}; known are {_VERSIONS}")
    return traverse_util.flatten_dict(target, sep=".", is_leaf=lambda _, node: "driver" in node)


def kvstore(folder: str | os.PathLike, spec: dict) -> dict:
    """Where a tensor lies now, whichever driver (gfile, gcs, file) it was written through.

    Args:
      folder: the checkpoint directory.
      spec: the tensor's spec from the file; its path is relative to the directory.

    Returns:
      TensorStore's description of the key-value store.
    """
    # Older versions of TensorStore put the path beside the store.
    relative = spec["kvstore"].get("path") or spec["path"]
    if not _is_remote(folder):
        return {"driver": "file", "path": os.path.join(folder, relative)}
    bucket, _, inside = os.fspath(folder).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": posixpath.join(inside, relative)}


def _open(folder: epath.Path, leaves: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(name to array or open TensorStore, names of which there is no data)."""
    context = ts.Context(
        {"file_io_concurrency": {"limit": 128}, "cache_pool": {"total_bytes_limit": CACHE_BYTES}}
    )
    futures = {
        name: ts.open(_zarr(folder, leaf), context=context, open=True, read=True)
        for name, leaf in leaves.items()
        if isinstance(leaf, dict)
    }
    tensors, absent = {n: leaf for n, leaf in leaves.items() if n not in futures}, []
    for name, future in futures.items():
        try:
            tensors[name] = future.result()
        except (ValueError, OSError):
            absent.append(name)
    return tensors, absent


def _zarr(folder: epath.Path, spec: dict) -> dict:
    # Metadata of the spec is left out: what is on disk counts. A chunk that is not there would be
    # read as zeros, but T5X writes every chunk.
    store = kvstore(folder, spec)
    spec = {"driver": "zarr", "kvstore": store, "recheck_cached_data": "open"}
    return spec | {"fill_missing_data_reads": False}


def _fetch(folder: epath.Path, tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Reads everything at once, in parallel."""
    reading = {name: x.read() for name, x in tensors.items() if isinstance(x, ts.TensorStore)}
    out, broken = {}, []
    for name, tensor in tensors.items():
        try:
            out[name] = _values(reading.pop(name).result() if name in reading else tensor)
        except (ValueError, OSError):
            broken.append(name)
    if broken:
        raise ValueError(f"{folder}: missing or damaged data of {', '.join(sorted(broken))}")
    return out


def _shapes(leaves: dict[str, Any], tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Unrolled name to shape; of a tensor without data the shape that the file announces."""

    def shape(name: str) -> tuple[int, ...]:
        announced = name not in tensors
        return tuple(leaves[name]["metadata"]["shape"] if announced else tensors[name].shape)

    stored = {name: jax.ShapeDtypeStruct(shape(name), jnp.float32) for name in leaves}
    return {name: x.shape for name, x in jax.eval_shape(unroll, stored).items()}


def _expected(model: T5) -> dict[str, tuple[int, ...]]:
    """The model's names and shapes in T5X's terms."""
    return {
        re.sub(r"\.weight$", ".kernel", name): shape[::-1] if name.endswith(".weight") else shape
        for name, shape in structure.shapes(model.unrolled.abstract()).items()
    }


def _our_name(name: str) -> str:
    return re.sub(r"\.kernel$", ".weight", name)


def _depth(names: dict[str, Any], stack: str) -> int:
    return len({n.split(".")[1] for n in names if n.startswith(f"{stack}.layers_")})
