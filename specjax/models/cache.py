"""The key/value cache: lengths per row, one writer, nothing rejected ever in it.

Per layer ``[B, H, S, D]``, written by one ``dynamic_update_slice`` per row: of the layouts tried,
only this one showed no cache-sized copy inside the decode loop on XLA CPU and in TPU programs alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specjax.decode.interfaces import Open


class Cache(NamedTuple):
    """Committed keys and values.

    Attributes:
      kv: per layer (key, value), each ``[B, H, S, D]``; slots from ``length`` on are garbage.
      length: int32 ``[B]``.
      cross: per layer (key, value) of the encoder's output, ``[B, H, L, D]``; () without encoder.
      cross_mask: bool ``[B, L]``, or None.
    """

    kv: tuple
    length: Int[Array, "B"]
    cross: tuple = ()
    cross_mask: Bool[Array, "B L"] | None = None


def empty_kv(layers: int, shape: tuple[int, int, int, int], dtype) -> tuple:
    """Zeroed (key, value) pairs; zeros, since 0 x garbage NaN would poison a masked softmax."""
    empty = lambda: heads_apart(jnp.zeros(shape, dtype))  # noqa: E731
    return tuple((empty(), empty()) for _ in range(layers))


def heads_apart(x: Float[Array, "B H S D"]) -> Float[Array, "B H S D"]:
    """Splits heads over the axis ``model`` of the mesh in use; as it is where that does not divide them.

    Else the compiler may keep whole caches on every device: nothing in an empty one tells it not to.
    """
    shards = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    if shards == 1 or x.shape[1] % shards:
        return x
    free = P.UNCONSTRAINED
    return lax.with_sharding_constraint(x, P(free, "model", free, free))


def write_open(old: Array, new: Array, at) -> Array:
    """Writes a block's keys or values ``[B, H, M, D]`` into open slots ``at ..``."""
    zero = jnp.zeros((), jnp.int32)
    return lax.dynamic_update_slice(old, new, (zero, zero, jnp.asarray(at, jnp.int32), zero))


def commit(cache: Cache, open: Open, keep: Int[Array, "B K"], count: Int[Array, "B"]) -> Cache:
    """Appends open slots ``keep[:count]`` to each row.

    All K slots are written (what lies behind ``count`` is overwritten by the next round), so the
    cache must have room for ``length + K``: `dynamic_update_slice` would otherwise shift the write.
    """
    picked = jnp.clip(keep, 0, open.position.shape[1] - 1)[:, None, :, None]
    # The minimum is 0, which XLA cannot know: the write depends on what the step has found, and so
    # comes after the reads. Else both would be free to move, and XLA copies the cache, twice a step.
    start = cache.length + jnp.minimum(count, 0)
    kv = tuple(
        tuple(
            _append(old, jnp.take_along_axis(new, picked, axis=2), start)
            for old, new in zip(layer, fresh, strict=True)
        )
        for layer, fresh in zip(cache.kv, open.kv, strict=True)
    )
    return cache._replace(kv=kv, length=cache.length + count)


def _append(old: Array, new: Array, start: Int[Array, "B"]) -> Array:
    zero = jnp.zeros((), jnp.int32)
    for row in range(old.shape[0]):
        index = (jnp.full((), row, jnp.int32), zero, start[row], zero)
        old = lax.dynamic_update_slice(old, new[row : row + 1], index)
    return old


def rewind(cache: Cache, length: Int[Array, "B"]) -> Cache:
    """Lowers lengths to ``length`` where they are above it."""
    return cache._replace(length=jnp.minimum(cache.length, length))
