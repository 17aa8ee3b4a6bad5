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
from specjax.models import heads, layers
from specjax.models.cache import Cache
from specjax.models.causal import Places, project
from specjax.models.llama import Llama, LlamaConfig
from specjax.models.t5 import T5

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

    def __post_init__(self):
        super().__post_init__()
        if self.scan_layers:
            raise ValueError("an EAGLE head's layers are not scanned")


class EagleParts:
    """What heads of all families have in common, beside the layers; the configuration says the sizes."""

    # The target's states that the head reads, side by side ``[B, M, n d]``.
    taps: tuple[str, ...] = (heads.TAP,)

    def features(self, params: PyTree, states: Float[Array, "B M n"]) -> Float[Array, "B M d"]:
        """What stands for the target's states in pairs: here they themselves."""
        del params
        return states

    def beside(self, target: Any) -> Any:
        """The head as it decodes with a target, whose embedding and output layer it has."""
        del target
        return type(self)(dataclasses.replace(self.config, alone=False))

    def parts(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of all but the layers."""
        c, normal = self.config, initializers.normal(0.02)
        join = {"weight": ((c.emb_dim, 2 * c.emb_dim), ("embed", "unmodeled"), normal)}
        if c.fc_bias:
            join["bias"] = ((c.emb_dim,), ("embed",), initializers.zeros)
        rows = {} if c.alone else {"embed_tokens": c.vocab_size, "lm_head": heads.known(c)}
        tables = {
            n: {"weight": ((k, c.emb_dim), ("vocab", "embed"), normal)} for n, k in rows.items()
        }
        return {"fc": join} | tables

    def join(self, params: PyTree, pairs: Pairs) -> Float[Array, "B M d"]:
        """What the first layer reads: token and state, joined."""
        dtype = self.config.dtype
        words = params["embed_tokens"]["weight"].astype(dtype)[pairs.tokens]
        return project(params["fc"], jnp.concatenate([words, pairs.states.astype(dtype)], axis=-1))

    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        """The target's output layer on the head's states, which no norm stands before (pitfall L6)."""
        wide = np.promote_types(x.dtype, np.float32)
        return layers.linear(x, params["lm_head"]["weight"], wide)

    def logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M V"]:
        """Logits of all pieces: minus infinity for what cannot be said."""
        known, vocab = self.known_logits(params, x), self.config.draft_vocab
        return known if vocab is None else vocab.whole(known)

    def read(
        self, params: PyTree, cache: Cache, block: Block, open: Open, at
    ) -> tuple[Float[Array, "B M d"], Open]:
        """(the states that stand for the pairs', the open slots with them); ``block.tokens`` are `Pairs`."""
        seen, open = self._behind(params, cache, block, open, at)
        return seen["last"], open


@dataclasses.dataclass(frozen=True)
class Eagle(EagleParts, Llama):
    """The head, with the caches of a model. Static: parameters are passed in."""

    config: EagleConfig = EagleConfig()

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter, under the authors' names."""
        out = {n: x for n, x in super().table().items() if n.startswith("layers_")}
        out["layers_0"] = {n: x for n, x in out["layers_0"].items() if n != "input_layernorm"}
        return out | self.parts()

    def embed(self, params: PyTree, tokens: Any, places: Places) -> Array:
        """`join`, of the `Pairs` that stand for tokens here."""
        del places
        return self.join(params, tokens)

    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        """The state itself."""
        del params
        return x

    def output(self, params: PyTree) -> Float[Array, "..."]:
        return params["lm_head"]["weight"]

    def begin(
        self, params: PyTree, prefilled: Prefilled, slots: int
    ) -> tuple[Cache, Float[Array, "B 1 d"], Int[Array, "B"]]:
        """Reads all pairs of the prompt but the last.

        Args:
          params: the head's.
          prefilled: the target's, with its states.
          slots: room in the cache beyond the prompt.

        Returns:
          (cache, the last pair's state, how many pairs are unread: 0 for a prompt of one token).
        """
        prompt, states = (
            prefilled.prompt,
            self.features(params, side_by_side(prefilled.taps, self.taps)),
        )
        count = jnp.maximum(prompt.length - 2, 0)
        pairs = Pairs(jnp.roll(prompt.tokens, -1, axis=1), states)
        _, kv = self._fill(params, pairs, count, slots)
        last = jnp.take_along_axis(states, count[:, None, None], axis=1)
        return Cache(caches.joined(kv), count), last, jnp.minimum(prompt.length - 1, 1)

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
        if isinstance(target, T5):
            raise ValueError("an EAGLE head of a Llama layer does not fit a T5; see eagle_t5")
        heads.check_target(self.config, target)
        output = heads.output_rows(self.config, target, params)
        return {"embed_tokens": dict(params["embed_tokens"]), "lm_head": {"weight": output}}


def side_by_side(states: dict[str, Array], taps: tuple[str, ...]) -> Float[Array, "B M n"]:
    """A target's states by tap as one array."""
    return jnp.concatenate([states[name] for name in taps], axis=-1)
