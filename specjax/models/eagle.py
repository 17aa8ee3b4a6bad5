"""EAGLE's head: one decoder layer that says the target's next hidden state from the last one and a token.

A *pair* is a token with the target's state behind which the target said it. The head reads pairs; pair i
holds state i and token i + 1, and what it puts out stands for state i + 1, from which the target's output
layer says token i + 2.

References:
  Li et al. 2024 (2401.15077), section 3.1, and the authors' released heads: states are those that the
  target's output layer reads, the layer has no input norm, and nothing is normed behind it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, Float, Int, PyTree

from specjax.decode.interfaces import Block, Open, Prefilled
from specjax.models import cache as caches
from specjax.models import layers
from specjax.models.cache import Cache
from specjax.models.causal import Places, project
from specjax.models.llama import Llama, LlamaConfig

# The target's hidden state that pairs have: what its output layer reads.
TAP = "final"
# What a head takes from its target, and files of heads therefore lack.
TAKEN = ("embed_tokens", "lm_head")


class Pairs(NamedTuple):
    """What the head reads.

    Attributes:
      tokens: int32 ``[B, M]``.
      states: ``[B, M, d]``: behind which the target (or the head, further ahead) said each of them.
    """

    tokens: Int[Array, "B M"]
    states: Float[Array, "B M d"]


@dataclasses.dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Sizes of the head's layer, and its target's embedding and output layer.

    The embedding always has all pieces; ``draft_vocab`` is of what the head can say.

    Attributes:
      fc_bias: whether the layer that joins token and state has a bias (the authors' Llama 3 heads lack it).
      alone: parameters without what is taken from the target, as files of heads are; they do not decode.
    """

    num_layers: int = 1
    fc_bias: bool = True
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Eagle(Llama):
    """The head, with the caches of a model. Static: parameters are passed in."""

    config: EagleConfig = EagleConfig()

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter, under the authors' names."""
        c, out = self.config, super().table()
        for i in range(c.num_layers):
            layer = dict(out[f"layers_{i}"])
            if i == 0:
                del layer["input_layernorm"]
            out[f"layers_{i}"] = layer
        del out["norm"]
        normal, joined = initializers.normal(0.02), (c.emb_dim, 2 * c.emb_dim)
        out["fc"] = {"weight": (joined, ("embed", "unmodeled"), normal)}
        if c.fc_bias:
            out["fc"]["bias"] = ((c.emb_dim,), ("embed",), initializers.zeros)
        said = c.vocab_size if c.draft_vocab is None else len(c.draft_vocab)
        for name, rows in (("embed_tokens", c.vocab_size), ("lm_head", said)):
            out.pop(name, None)
            if not c.alone:
                out[name] = {"weight": ((rows, c.emb_dim), ("vocab", "embed"), normal)}
        return out

    def embed(self, params: PyTree, tokens: Any, places: Places) -> Array:
        """What the layer reads of `Pairs`: token and state, joined."""
        del places
        words = params["embed_tokens"]["weight"].astype(self.config.dtype)[tokens.tokens]
        return project(params["fc"], jnp.concatenate([words, tokens.states], axis=-1))

    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        """The state itself: no norm (pitfall L6)."""
        del params
        return x

    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        """The target's output layer on the head's states."""
        wide = np.promote_types(x.dtype, np.float32)
        return layers.linear(x, params["lm_head"]["weight"], wide)

    def output(self, params: PyTree) -> Float[Array, "..."]:
        return params["lm_head"]["weight"]

    def begin(
        self, params: PyTree, prefilled: Prefilled, tap: str, slots: int
    ) -> tuple[Cache, Float[Array, "B 1 d"], Int[Array, "B"]]:
        """Reads all pairs of the prompt but the last.

        Args:
          params: the head's.
          prefilled: the target's, with its states under ``tap``.
          tap: which states.
          slots: room in the cache beyond the prompt.

        Returns:
          (cache, the last pair's state, how many pairs are unread: 0 for a prompt of one token).
        """
        prompt, states = prefilled.prompt, prefilled.taps[tap]
        count = jnp.maximum(prompt.length - 2, 0)
        pairs = Pairs(jnp.roll(prompt.tokens, -1, axis=1), states)
        _, kv = self._fill(params, pairs, count, slots)
        last = jnp.take_along_axis(states, count[:, None, None], axis=1)
        return Cache(caches.joined(kv), count), last, jnp.minimum(prompt.length - 1, 1)

    def read(
        self, params: PyTree, cache: Cache, block: Block, open: Open, at
    ) -> tuple[Float[Array, "B M d"], Open]:
        """(the states that stand for the pairs', the open slots with them); ``block.tokens`` are `Pairs`."""
        seen, open = self._behind(params, cache, block, open, at)
        return seen["last"], open

    def next_states(self, params: PyTree, pairs: Pairs, batch: dict) -> Float[Array, "B M d"]:
        """The same for whole texts of pairs, as training reads them; all it needs of a ``batch``."""
        del batch
        return self._teach(params, pairs)["last"]

    def taken(self, target: Any, params: PyTree) -> PyTree:
        """What a head takes from its target: embedding, and the rows of the output layer that it can say.

        Args:
          target: its target.
          params: the target's parameters, tiled or not.

        Raises:
          ValueError: the target has other sizes.
        """
        c, theirs = self.config, target.config
        if (c.vocab_size, c.emb_dim) != (theirs.vocab_size, theirs.emb_dim):
            raise ValueError(
                f"the head is for {c.vocab_size} pieces and width {c.emb_dim}, the target has "
                f"{theirs.vocab_size} and {theirs.emb_dim}"
            )
        output = layers.untile(target.output(params))
        if c.draft_vocab is not None:
            output = output[jnp.asarray(c.draft_vocab.ids)]
        return {"embed_tokens": dict(params["embed_tokens"]), "lm_head": {"weight": output}}
