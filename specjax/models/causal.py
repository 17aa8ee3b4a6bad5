"""Decoder-only models: everything but the layer itself.

The prompt is the beginning of the text; its newest token is in no cache. Prompts of a batch may differ
in length: they stand at the left, and what lies behind a row's length is never read.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from specjax.decode.interfaces import Block, Extended, Open, Prefilled, Prompt, Text
from specjax.models import cache as caches
from specjax.models import layers, stack
from specjax.models.base import Base
from specjax.models.cache import Cache
from specjax.models.draft_vocab import DraftVocab

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


class Causal(Base):
    """The `Model` protocol for a decoder-only family; a frozen dataclass with a ``config``.

    Beside what `Base` asks for, the configuration has ``emb_dim, num_layers, num_heads, num_kv_heads``.
    """

    reads = ()

    @property
    def kv_layers(self) -> tuple[int, int]:
        return self.config.num_layers, self.config.num_kv_heads

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest text; None where positions have no end."""
        return None

    # What a family says.

    @abc.abstractmethod
    def embed(self, params: PyTree, tokens: Int[Array, "B M"], places: Places) -> Array:
        """What the first layer reads, ``[B, M, d]``."""

    def shared(self, places: Places) -> Any:
        """What all layers need to know of the places, made once."""
        del places

    @abc.abstractmethod
    def layer(self, weights: PyTree, x: Float[Array, "B M d"], shared: Any, attend: Attend):
        """One layer, given what `shared` made: ``(x, what attention kept)``."""

    @abc.abstractmethod
    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        """What the output layer reads: the last layer's output, normed."""

    @abc.abstractmethod
    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        """Logits, float32 at least, of the pieces that the model knows: all V of most models."""

    @property
    def draft_vocab(self) -> DraftVocab | None:
        """The pieces that a draft knows, where these are not all."""
        return getattr(self.config, "draft_vocab", None)

    def logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M V"]:
        """Logits of all pieces."""
        known = self.known_logits(params, x)
        return known if self.draft_vocab is None else self.draft_vocab.whole(known)

    # Decoding.

    def prefill(self, params: PyTree, prompt: Prompt, slots: int, *, taps=()) -> Prefilled:
        """Reads the prompt; text and caches have room for ``slots`` tokens more.

        Taps are ``[B, L, d]``, one state per token of the prompt.

        Raises:
          ValueError: a forced prefix, which only an encoder-decoder has.
        """
        if prompt.prefix is not None:
            raise ValueError("a decoder-only model has no forced prefix: put it into the prompt")
        seen, kv = self._fill(params, prompt.tokens, prompt.length, slots)
        cache = Cache(caches.joined(kv), prompt.length - 1)
        text = Text(jnp.pad(prompt.tokens, [(0, 0), (0, slots)]), prompt.length)
        return Prefilled(cache, text, self._taps(params, seen, taps), prompt)

    def _fill(
        self, params: PyTree, tokens, length: Int[Array, "B"], slots: int
    ) -> tuple[dict, Any]:
        """(states by tap, keys and values with room for ``slots`` more) of whole texts."""
        batch, width = length.shape[0], jax.tree.leaves(tokens)[0].shape[1]
        steps = jnp.arange(width, dtype=jnp.int32)
        places = Places(
            jnp.broadcast_to(steps, (batch, width)),
            jnp.broadcast_to(length[:, None], (batch, width)),
        )
        bias = layers.mask_bias(steps[None] <= steps[:, None])[None, None]
        room = [(0, 0), (0, 0), (0, slots), (0, 0)]

        def attend(query, key, value, i):
            kept = tuple(caches.heads_apart(jnp.pad(x, room)) for x in (key, value))
            return layers.attend_grouped(query, [(key, value, bias)]), kept

        return self._read(params, tokens, places, attend)

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
        seen, open = self._behind(params, cache, block, open, at)
        given = self._taps(params, seen, taps)
        logits = self.logits(params, self.finish(params, seen["last"][:, logits_from:]))
        return Extended(logits, given, open)

    def _behind(self, params: PyTree, cache: Cache, block: Block, open, at) -> tuple[dict, Open]:
        """(states by tap, the open slots with the block) of what is read behind a cache."""
        open, position, at = self.placed(cache, block, open, at)
        slots = jnp.arange(caches.slots(cache.kv), dtype=jnp.int32)
        cached = layers.mask_bias(slots[None] < cache.length[:, None])[:, None, None]
        cached = jnp.broadcast_to(cached, (*cached.shape[:2], position.shape[1], slots.size))
        opened = layers.mask_bias(block.mask)[:, None]

        def attend(query, key, value, i):
            fresh = caches.write_layer(open.kv, i, (key, value), at)
            sources = [(*caches.layer(cache.kv, i), cached), (*fresh, opened)]
            return layers.attend_grouped(query, sources), fresh

        seen, kv = self._read(params, block.tokens, Places(position, position + 1), attend)
        return seen, open._replace(kv=caches.joined(kv))

    # Training.

    def forward(
        self, params: PyTree, tokens: Int[Array, "B T"], remat_policy: str = "none"
    ) -> Float[Array, "B T K"]:
        """Logits of the known pieces after every token of right-padded texts."""
        seen = self._teach(params, tokens, remat_policy)
        return layers.rows_apart(self.known_logits(params, self.finish(params, seen["last"])))

    def states(
        self, params: PyTree, tokens: Int[Array, "B T"], taps: tuple[str, ...]
    ) -> dict[str, Float[Array, "B T d"]]:
        """Hidden states after every token of right-padded texts, by tap."""
        return self._taps(params, self._teach(params, tokens), taps)

    def _teach(self, params: PyTree, tokens, remat_policy: str = "none") -> dict:
        """States by tap of whole texts."""
        batch, width = jax.tree.leaves(tokens)[0].shape[:2]
        steps = jnp.arange(width, dtype=jnp.int32)
        bias = layers.mask_bias(steps[None] <= steps[:, None])[None, None]
        position = jnp.broadcast_to(steps, (batch, width))
        places = Places(position, jnp.full_like(position, width))

        def attend(query, key, value, i):
            return layers.attend_grouped(query, [(key, value, bias)]), None

        return self._read(params, tokens, places, attend, remat_policy)[0]

    def _read(
        self, params, tokens, places: Places, attend, remat_policy="none"
    ) -> tuple[dict, Any]:
        """(states by tap, what attention kept of every layer)."""

        shared = self.shared(places)

        def body(x, weights, i):
            out, kept = self.layer(weights, x, shared, lambda *qkv: attend(*qkv, i))
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
