"""Decoder-only models: everything but the layer itself.

The prompt is the beginning of the text; its newest token is in no cache. Prompts of a batch may differ
in length: they stand at the left, and what lies behind a row's length is never read.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax.decode.interfaces import Block, Extended, Open, Prefilled, Prompt, Text
from specjax.models import cache as caches
from specjax.models import layers, stack
from specjax.models.cache import Cache

# Attention of one layer: (query, key, value) to (what it read, the keys and values to keep).
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


class Places(NamedTuple):
    """Where tokens stand.

    Attributes:
      position: int32 ``[B, M]``, from 0.
      span: int32 ``[B, M]``: how long the text is when a token is read: the prompt's length for all of
        the prompt, as other libraries read it, then one more for each. Only dynamic rotary scaling
        asks for it.
    """

    position: Int[Array, "B M"]
    span: Int[Array, "B M"]


class Causal(abc.ABC):
    """The `Model` protocol for a decoder-only family; a frozen dataclass with a ``config``.

    The configuration has ``vocab_size, emb_dim, num_layers, num_heads, num_kv_heads, head_dim,
    scan_layers, dtype, eos_id``.
    """

    config: Any
    reads = ()

    @property
    def eos_id(self) -> int:
        return self.config.eos_id

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest text; None where positions have no end."""
        return None

    # What a family says.

    @abc.abstractmethod
    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter."""

    @abc.abstractmethod
    def embed(self, params: PyTree, tokens: Int[Array, "B M"], places: Places) -> Array:
        """What the first layer reads, ``[B, M, d]``."""

    @abc.abstractmethod
    def layer(self, weights: PyTree, x: Float[Array, "B M d"], places: Places, attend: Attend):
        """One layer: ``(x, what attention kept)``."""

    @abc.abstractmethod
    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        """What the output layer reads: the last layer's output, normed."""

    @abc.abstractmethod
    def logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M V"]:
        """Logits, float32 at least."""

    # Parameters.

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Random parameters."""
        spec, treedef = jax.tree.flatten(self.table(), is_leaf=_is_leaf)
        keys = jax.random.split(key, len(spec))
        make = lambda leaf, key: leaf[2](key, leaf[0], jnp.float32)  # noqa: E731
        return treedef.unflatten([make(leaf, k) for leaf, k in zip(spec, keys, strict=True)])

    def abstract(self, dtype=jnp.float32) -> PyTree[jax.ShapeDtypeStruct]:
        of = lambda leaf: jax.ShapeDtypeStruct(leaf[0], dtype)  # noqa: E731
        return jax.tree.map(of, self.table(), is_leaf=_is_leaf)

    def logical_axes(self) -> PyTree[tuple[str, ...]]:
        return jax.tree.map(lambda leaf: leaf[1], self.table(), is_leaf=_is_leaf)

    # Decoding.

    def prefill(self, params: PyTree, prompt: Prompt, slots: int, *, taps=()) -> Prefilled:
        """Reads the prompt; text and caches have room for ``slots`` tokens more.

        Taps are ``[B, L, d]``, one state per token of the prompt.

        Raises:
          ValueError: a forced prefix, which only an encoder-decoder has.
        """
        if prompt.prefix is not None:
            raise ValueError("a decoder-only model has no forced prefix: put it into the prompt")
        batch, width = prompt.tokens.shape
        steps = jnp.arange(width, dtype=jnp.int32)
        places = Places(
            jnp.broadcast_to(steps, (batch, width)),
            jnp.broadcast_to(prompt.length[:, None], (batch, width)),
        )
        bias = layers.mask_bias(steps[None] <= steps[:, None])[None, None]
        room = [(0, 0), (0, 0), (0, slots), (0, 0)]

        def attend(query, key, value, i):
            kept = tuple(caches.heads_apart(jnp.pad(x, room)) for x in (key, value))
            return layers.attend_grouped(query, [(key, value, bias)]), kept

        seen, kv = self._read(params, prompt.tokens, places, attend)
        cache = Cache(caches.joined(kv), prompt.length - 1)
        text = Text(jnp.pad(prompt.tokens, [(0, 0), (0, slots)]), prompt.length)
        return Prefilled(cache, text, self._taps(params, seen, taps), prompt)

    def open(self, batch: int, width: int) -> Open:
        config = self.config
        shape = (batch, config.num_kv_heads, width, config.head_dim)
        kv = caches.empty_kv(config.num_layers, shape, config.dtype, config.scan_layers)
        return Open(kv, jnp.zeros((batch, width), jnp.int32))

    def extend(
        self,
        params: PyTree,
        cache: Cache,
        block: Block,
        open: Open | None = None,
        at=0,
        *,
        taps=(),
        logits_from=0,
    ) -> Extended:
        """Reads ``block`` behind the cache. See `Model.extend`."""
        if open is None:
            open = self.open(*block.mask.shape[::2])
        position = cache.length[:, None] + block.depth
        at = jnp.asarray(at, jnp.int32)
        start = (jnp.zeros((), jnp.int32), at)
        open_position = lax.dynamic_update_slice(open.position, position, start)
        slots = jnp.arange(caches.slots(cache.kv), dtype=jnp.int32)
        cached = layers.mask_bias(slots[None] < cache.length[:, None])[:, None, None]
        cached = jnp.broadcast_to(cached, (*cached.shape[:2], position.shape[1], slots.size))
        opened = layers.mask_bias(block.mask)[:, None]

        def attend(query, key, value, i):
            fresh = tuple(
                caches.write_open(old, new, at)
                for old, new in zip(caches.layer(open.kv, i), (key, value), strict=True)
            )
            sources = [(*caches.layer(cache.kv, i), cached), (*fresh, opened)]
            return layers.attend_grouped(query, sources), fresh

        seen, kv = self._read(params, block.tokens, Places(position, position + 1), attend)
        given = self._taps(params, seen, taps)
        logits = self.logits(params, self.finish(params, seen["last"][:, logits_from:]))
        return Extended(logits, given, Open(caches.joined(kv), open_position))

    def commit(self, cache: Cache, open: Open, keep, count) -> Cache:
        return caches.commit(cache, open, keep, count)

    def rewind(self, cache: Cache, length) -> Cache:
        return caches.rewind(cache, length)

    # Training.

    def forward(
        self, params: PyTree, tokens: Int[Array, "B T"], remat_policy: str = "none"
    ) -> Float[Array, "B T V"]:
        """Logits after every token of right-padded texts."""
        batch, width = tokens.shape
        steps = jnp.arange(width, dtype=jnp.int32)
        bias = layers.mask_bias(steps[None] <= steps[:, None])[None, None]
        position = jnp.broadcast_to(steps, (batch, width))
        places = Places(position, jnp.full_like(position, width))

        def attend(query, key, value, i):
            return layers.attend_grouped(query, [(key, value, bias)]), None

        seen, _ = self._read(params, tokens, places, attend, remat_policy)
        return layers.rows_apart(self.logits(params, self.finish(params, seen["last"])))

    def _read(
        self, params, tokens, places: Places, attend, remat_policy="none"
    ) -> tuple[dict, Any]:
        """(states by tap, what attention kept of every layer)."""

        def body(x, weights, i):
            out, kept = self.layer(weights, x, places, lambda *qkv: attend(*qkv, i))
            return layers.rows_apart(out), (kept, x)

        x = layers.rows_apart(self.embed(params, tokens, places))
        x, outs = stack.run(params, body, x, remat_policy)
        kept, seen = stack.split(outs)
        return seen | {"last": x}, kept

    def _taps(self, params: PyTree, seen: dict, taps: tuple[str, ...]) -> dict:
        made = {"final": self.finish(params, seen["last"])} if "final" in taps else {}
        return {name: (seen | made)[name] for name in taps}

    def tile(self, params: PyTree) -> PyTree:
        """The parameters laid out for a CPU (`layers.tile`), numerically the same model.

        A tied output layer becomes one of its own: the table is gathered from in one layout and
        multiplied in another. Scanned layers stay as they are. On accelerators leave all as it is.
        """

        def of(path, leaf):
            names = [part.key for part in path]
            is_table = any(name.startswith("embed") for name in names) or stack.SCANNED in names
            return leaf if is_table or leaf.ndim != 2 else layers.tile(leaf)

        tiled = jax.tree.map_with_path(of, params)
        return tiled | {"lm_head": {"weight": layers.tile(self.output(params))}}

    def output(self, params: PyTree) -> Float[Array, "..."]:
        """The output layer, which may be the embedding."""
        name = "lm_head" if "lm_head" in params else "embed_tokens"
        return params[name]["weight"]


def project(weights: PyTree, x: Float[Array, "B M K"]) -> Float[Array, "B M N"]:
    """A linear layer, with a bias where it has one."""
    y = layers.linear(x, weights["weight"])
    return y + weights["bias"].astype(y.dtype)[None, None] if "bias" in weights else y


def _is_leaf(node) -> bool:
    return isinstance(node, tuple)
