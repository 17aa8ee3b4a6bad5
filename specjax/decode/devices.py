"""Arrays between one host's memory and a mesh that may span several hosts.

With several processes all of them run the same program. Of host values that all have, each puts its
share on its own devices (`put`); or each has nothing but its share (`put_own_rows`).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, PyTree


def row_axes(mesh: Mesh | None) -> tuple[str, ...]:
    """The axes of a mesh that rows are split over."""
    return () if mesh is None else tuple(n for n in mesh.axis_names if n != "model")


def row_shards(mesh: Mesh | None) -> int:
    """How many groups of devices rows are split over."""
    return math.prod(mesh.shape[name] for name in row_axes(mesh))


def anywhere(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether a flag is set in any of the groups of devices that run this program on their own rows.

    A loop inside of a round must end in all groups at once (see `loop.live_rows`), and what drafts in
    it knows no mesh: the axes are those of the `shard_map` it stands in.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.psum(flag.astype(jnp.int32), axes) > 0 if axes else flag


def put(tree: PyTree, sharding: Sharding | PyTree[Sharding]) -> PyTree:
    """Puts host values (the same in every process) on a mesh.

    Args:
      tree: NumPy arrays, or anything that becomes one; typed random keys too.
      sharding: one for all leaves, or a tree of them.

    Returns:
      Global arrays.
    """
    if isinstance(sharding, Sharding):
        return jax.tree.map(lambda x: _put(x, sharding), tree)
    return jax.tree.map(_put, tree, sharding)


def _put(x, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding == sharding else jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Splits the first axis of every leaf over all of the mesh's axes but ``model``."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)
    return put(tree, NamedSharding(mesh, P(row_axes(mesh))))


def own_rows(sharding: Sharding, rows: int) -> np.ndarray:
    """Which rows of an array this process's devices hold.

    Args:
      sharding: splits the first axis of it.
      rows: how many there are.

    Returns:
      int ``[N]``, rising.
    """
    numbers = np.arange(rows)
    held = [numbers[index] for index in sharding.addressable_devices_indices_map((rows,)).values()]
    return np.unique(np.concatenate(held))


def put_own_rows(tree: PyTree, sharding: Sharding, rows: int) -> PyTree:
    """Puts what each process has of the rows on a mesh.

    Args:
      tree: NumPy arrays ``[N, …]``, the rows that `own_rows` names; processes that hold the same rows
        have the same values.
      sharding: splits the first axis.
      rows: how many there are in all processes together.

    Returns:
      Global arrays ``[rows, …]``.
    """

    numbers, own = np.arange(rows), own_rows(sharding, rows)

    def of(x) -> jax.Array:
        at = lambda index: x[np.searchsorted(own, numbers[index[0]])]  # noqa: E731
        return jax.make_array_from_callback((rows, *x.shape[1:]), sharding, at)

    return jax.tree.map(of, tree)


def fetch(tree: PyTree) -> PyTree:
    """The whole of every array as NumPy, in every process."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable or x.is_fully_replicated for x in leaves):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
