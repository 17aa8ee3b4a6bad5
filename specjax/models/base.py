"""What all model families have in common: parameters from a table, caches, open slots."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key, PyTree

from specjax.decode.interfaces import Block, Open
from specjax.models import cache as caches
from specjax.models.cache import Cache


class Tabled(abc.ABC):
    """Parameters from a table of them."""

    @abc.abstractmethod
    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter."""

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Random parameters."""
        spec, treedef = jax.tree.flatten(self.table(), is_leaf=_is_leaf)
        keys = jax.random.split(key, len(spec))
        make = lambda leaf, key: leaf[2](key, leaf[0], jnp.float32)  # noqa: E731
        return treedef.unflatten([make(leaf, k) for leaf, k in zip(spec, keys, strict=True)])

    def abstract(self, dtype=jnp.float32) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and types of the parameters."""
        of = lambda leaf: jax.ShapeDtypeStruct(leaf[0], dtype)  # noqa: E731
        return jax.tree.map(of, self.table(), is_leaf=_is_leaf)

    def logical_axes(self) -> PyTree[tuple[str, ...]]:
        """Logical axis names of the parameters."""
        return jax.tree.map(lambda leaf: leaf[1], self.table(), is_leaf=_is_leaf)


class Base(Tabled):
    """The part of the `Model` protocol that is the same for all; a frozen dataclass with a ``config``.

    The configuration has ``vocab_size, head_dim, scan_layers, dtype, eos_id``.
    """

    config: Any

    @property
    @abc.abstractmethod
    def kv_layers(self) -> tuple[int, int]:
        """Layers with a cache, and the heads of their keys and values."""

    @property
    def eos_id(self) -> int:
        return self.config.eos_id

    @property
    def other_eos_ids(self) -> tuple[int, ...]:
        """Further ids that end a text."""
        return getattr(self.config, "other_eos_ids", ())

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def unrolled(self) -> Any:
        """The same model with unrolled layers, which is how checkpoints of others name them."""
        return type(self)(dataclasses.replace(self.config, scan_layers=False))

    # Caches.

    def empty_kv(self, batch: int, slots: int) -> tuple:
        """Empty keys and values of all layers."""
        config, (layers, heads) = self.config, self.kv_layers
        shape = (batch, heads, slots, config.head_dim)
        return caches.empty_kv(layers, shape, config.dtype, config.scan_layers)

    def open(self, batch: int, width: int) -> Open:
        """Empty open slots."""
        return Open(self.empty_kv(batch, width), jnp.zeros((batch, width), jnp.int32))

    def placed(
        self, cache: Cache, block: Block, open: Open | None, at: Any
    ) -> tuple[Open, Int[Array, "B M"], Int[Array, ""]]:
        """(open slots that know the block's positions, these positions, the first slot of the block)."""
        if open is None:
            open = self.open(*block.mask.shape[::2])
        position, at = cache.length[:, None] + block.depth, jnp.asarray(at, jnp.int32)
        start = (jnp.zeros((), jnp.int32), at)
        known = lax.dynamic_update_slice(open.position, position, start)
        return open._replace(position=known), position, at

    def commit(self, cache: Cache, open: Open, keep, count) -> Cache:
        """See `Model.commit`."""
        return caches.commit(cache, open, keep, count)

    def rewind(self, cache: Cache, length) -> Cache:
        """See `Model.rewind`."""
        return caches.rewind(cache, length)


def _is_leaf(node) -> bool:
    return isinstance(node, tuple)
