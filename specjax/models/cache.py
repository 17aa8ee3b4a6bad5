"""The key/value cache: lengths per row, one writer, nothing rejected ever in it.

Per layer ``[B, H, S, D]``, written by one ``dynamic_update_slice`` per row: of the layouts tried,
only this one showed no cache-sized copy inside the decode loop on XLA CPU and in TPU programs alike.
Of scanned layers (`specjax.models.stack`) all keys are one array ``[B, L, H, S, D]``, rows first as
everywhere, and so are all values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specjax.decode.interfaces import Open


class Cache(NamedTuple):
    """Committed keys and values.

    Attributes:
      kv: per layer (key, value), each ``[B, H, S, D]``; slots from ``length`` on are garbage. Of
        scanned layers one pair for all of them, ``[B, L, H, S, D]``; open slots and ``cross`` too.
      length: int32 ``[B]``.
      cross: per layer (key, value) of the encoder's output, ``[B, H, L, D]``; () without encoder.
      cross_mask: bool ``[B, L]``, or None.
    """

    kv: tuple
    length: Int[Array, "B"]
    cross: tuple = ()
    cross_mask: Bool[Array, "B L"] | None = None


def empty_kv(layers: int, shape: tuple[int, int, int, int], dtype, scan: bool = False) -> tuple:
    """Zeroed (key, value) pairs; zeros, since 0 x garbage NaN would poison a masked softmax.

    Args:
      layers: how many.
      shape: ``(B, H, S, D)``.
      dtype: of keys and values.
      scan: whether layers are scanned.
    """
    if scan:
        shape, layers = (shape[0], layers, *shape[1:]), 1
    empty = lambda: heads_apart(jnp.zeros(shape, dtype))  # noqa: E731
    return tuple((empty(), empty()) for _ in range(layers))


def layer(kv: tuple, i: Any) -> tuple:
    """Layer ``i``'s (key, value); ``i`` is an int, or traced where layers are scanned."""
    if isinstance(i, int):
        return kv[i]
    return tuple(lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for x in kv[0])


def joined(layers: Any) -> tuple:
    """What `stack.run` put out, a (key, value) per layer, as caches hold it."""
    if isinstance(layers, list):
        return tuple(layers)
    return (tuple(jnp.moveaxis(x, 0, 1) for x in layers),)


def slots(kv: tuple) -> int:
    """S: slots per row."""
    return kv[0][0].shape[-2]


def heads_apart(x: Float[Array, "B *L H S D"]) -> Float[Array, "B *L H S D"]:
    """Splits heads over the axis ``model`` of the mesh in use; as it is where that does not divide them.

    Else the compiler may keep whole caches on every device: nothing in an empty one tells it not to.
    """
    shards = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    if shards == 1 or x.shape[-3] % shards:
        return x
    free = P.UNCONSTRAINED
    return lax.with_sharding_constraint(x, P(*[free] * (x.ndim - 3), "model", free, free))


def write_open(old: Array, new: Array, at) -> Array:
    """Writes a block's keys or values ``[B, H, M, D]`` into open slots ``at ..``."""
    zero = jnp.zeros((), jnp.int32)
    return lax.dynamic_update_slice(old, new, (zero, zero, jnp.asarray(at, jnp.int32), zero))


def write_layer(kv: tuple, i: Any, new: tuple, at) -> tuple:
    """Layer ``i``'s open slots with a block's (key, value) written ``at ..``."""
    return tuple(write_open(old, x, at) for old, x in zip(layer(kv, i), new, strict=True))


def commit(cache: Cache, open: Open, keep: Int[Array, "B K"], count: Int[Array, "B"]) -> Cache:
    """Appends open slots ``keep[:count]`` to each row.

    All K slots are written (what lies behind ``count`` is overwritten by the next round), so the
    cache must have room for ``length + K``: `dynamic_update_slice` would otherwise shift the write.
    """
    picked = jnp.clip(keep, 0, open.position.shape[1] - 1)[:, :, None]
    # The minimum is 0, which XLA cannot know: the write depends on what the step has found, and so
    # comes after the reads. Else both would be free to move, and XLA copies the cache, twice a step.
    start = cache.length + jnp.minimum(count, 0)
    kv = tuple(
        tuple(
            _append(old, _picked(new, picked), start) for old, new in zip(layer, fresh, strict=True)
        )
        for layer, fresh in zip(cache.kv, open.kv, strict=True)
    )
    return cache._replace(kv=kv, length=cache.length + count)


def _picked(new: Array, picked: Int[Array, "B K 1"]) -> Array:
    """Slots of open keys or values, whatever axes stand between rows and slots."""
    between = tuple(range(1, new.ndim - 2))
    return jnp.take_along_axis(new, jnp.expand_dims(picked, between), axis=new.ndim - 2)


def _append(old: Array, new: Array, start: Int[Array, "B"]) -> Array:
    zero = jnp.zeros((), jnp.int32)
    for row in range(old.shape[0]):
        between = (zero,) * (old.ndim - 3)
        index = (jnp.full((), row, jnp.int32), *between, start[row], zero)
        old = lax.dynamic_update_slice(old, new[row : row + 1], index)
    return old


def rewind(cache: Cache, length: Int[Array, "B"]) -> Cache:
    """Lowers lengths to ``length`` where they are above it."""
    return cache._replace(length=jnp.minimum(cache.length, length))
