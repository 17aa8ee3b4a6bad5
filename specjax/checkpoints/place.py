"""From a file straight to where a parameter shall lie: read by slices, cast, put on its device.

No reader holds a whole model in host memory: every leaf is read, cast and placed by itself, a few
of them at a time.
"""

import concurrent.futures
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import PyTree

from specjax.checkpoints import structure
from specjax.models import stack
from specjax.models.families import Network

# Leaves in flight at once: enough to hide a remote store's latency, few enough for host memory.
READERS = 8

# Reads a part of a tensor, one slice per axis.
Read = Callable[[tuple[slice, ...]], np.ndarray]


def targets(model: Network, dtype, shardings: PyTree | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, type and sharding of every parameter.

    Args:
      model: what the parameters are for.
      dtype: their type.
      shardings: None for the default device, one sharding for all of them, or a tree of shardings
        like the parameters.

    Returns:
      Dotted name to abstract leaf.

    Raises:
      ValueError: the tree has other names than the model, or a sharding does not divide its leaf.
    """
    flat = structure.flatten(model.abstract(dtype))
    if shardings is None:
        return flat
    single = isinstance(shardings, jax.sharding.Sharding)
    given = dict.fromkeys(flat, shardings) if single else structure.flatten(shardings)
    bad = [n for n, leaf in flat.items() if n in given and not _divides(given[n], leaf.shape)]
    names = dict.fromkeys(given), dict.fromkeys(flat)
    structure.check(*names, "the tree of shardings", not_divided_evenly=bad)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given[name])
        for name, leaf in flat.items()
    }


def leaf(read: Read, target: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter; of a sharded one each device's part is read by itself.

    Args:
      read: gives parts of the tensor in the file.
      target: shape, type and sharding of the result.

    Returns:
      The array.
    """

    def part(index: tuple[slice, ...]) -> np.ndarray:
        return np.asarray(read(index)).astype(target.dtype, copy=False)

    if target.sharding is None:
        return jnp.asarray(part((slice(None),) * len(target.shape)))
    return jax.make_array_from_callback(target.shape, target.sharding, part, dtype=target.dtype)


def tree(
    reads: Mapping[str, Read],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    called: Mapping[str, str],
    where: str,
) -> PyTree:
    """All parameters, a few leaves at a time.

    Args:
      reads: per name, how to read it, in the order in which that is done; of layers that the model
        scans the names of unrolled ones.
      wanted: see `targets`.
      called: the checkpoint's own names, for the message.
      where: the checkpoint, for the message.

    Returns:
      The nested dict of parameters.

    Raises:
      ValueError: data that cannot be read; all tensors concerned are named.
    """
    reads, called = _piled(reads, called, wanted)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        pending = {name: pool.submit(leaf, read, wanted[name]) for name, read in reads.items()}
    flat, broken = {}, []
    for name, future in pending.items():
        try:
            flat[name] = future.result()
        except (ValueError, OSError, safetensors.SafetensorError):
            broken.append(called[name])
    if broken:
        raise ValueError(f"{where}: missing or damaged data of {', '.join(sorted(broken))}")
    return structure.unflatten(flat)


def _piled(
    reads: Mapping[str, Read], called: Mapping[str, str], wanted: Mapping[str, Any]
) -> tuple[dict[str, Read], dict[str, str]]:
    """Reads and names with one pile instead of the layers that are wanted as one parameter."""
    piles: dict[str, list[str]] = {}
    for name in reads:
        if name not in wanted:
            piles.setdefault(re.sub(r"\blayers_\d+\b", stack.SCANNED, name), []).append(name)
    out = {name: read for name, read in reads.items() if name in wanted}
    names = {name: called[name] for name in out}
    for pile, layers in piles.items():
        layers.sort(key=lambda name: int(re.search(r"\blayers_(\d+)\b", name)[1]))
        out[pile] = _pile([reads[name] for name in layers])
        names[pile] = ", ".join(called[name] for name in layers)
    return out, names


def _pile(reads: list[Read]) -> Read:
    """Reads a part of many layers' tensors, layers as first axis."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        return np.stack([np.asarray(one(index[1:])) for one in reads[index[0]]])

    return read


def _divides(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):  # the latter for more axes than the leaf has
        return False
    return True
