"""EAGLE's head for T5: a decoder layer of its own that reads the target's encoder output too.

No such head was published. It is `specjax.models.eagle` with T5's layer as it is: pairs of state and token,
and no norm behind the last layer. States are those behind ``decoder_norm``; a tied output layer's d^-1/2 is
in the weight that the head takes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, Float, Int, PyTree

from specjax.decode.interfaces import Block, Open, Prefilled
from specjax.models import cache as caches
from specjax.models import layers, stack
from specjax.models.cache import Cache
from specjax.models.causal import project
from specjax.models.draft_vocab import DraftVocab
from specjax.models.eagle import Pairs
from specjax.models.t5 import T5, T5Config, cross_kv


@dataclasses.dataclass(frozen=True)
class EagleT5Config(T5Config):
    """Sizes of the head's decoder layers, and its target's embedding and output layer.

    Attributes:
      draft_vocab: the pieces that it can say; None for all.
      fc_bias: whether the layer that joins token and state has a bias.
      alone: parameters without what is taken from the target, as files of heads are; they do not decode.
    """

    draft_vocab: DraftVocab | None = None
    fc_bias: bool = True
    alone: bool = False

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.draft_vocab, dict):
            object.__setattr__(self, "draft_vocab", DraftVocab(**self.draft_vocab))
        if self.encoded_dim is None:
            raise ValueError("a head reads its target's encoder output: set encoded_dim")


@dataclasses.dataclass(frozen=True)
class EagleT5(T5):
    """The head, with the caches of a decoder. Static: parameters are passed in."""

    config: EagleT5Config

    # What it reads of the target's prefill.
    reads = ("encoded",)

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter."""
        c, out = self.config, super().table()
        out["fc"] = {
            "weight": (
                (c.emb_dim, 2 * c.emb_dim), ("embed", "unmodeled"), initializers.normal(0.02),
            )
        }  # fmt: skip
        if c.fc_bias:
            out["fc"]["bias"] = ((c.emb_dim,), ("embed",), initializers.zeros)
        decoder = dict(out["decoder"])
        del decoder["decoder_norm"]
        decoder.pop("logits_dense", None)
        del out["token_embedder"]
        out["decoder"] = decoder
        if not c.alone:
            said = c.vocab_size if c.draft_vocab is None else len(c.draft_vocab)
            for name, rows in (("embed_tokens", c.vocab_size), ("lm_head", said)):
                made = ((rows, c.emb_dim), ("vocab", "embed"), initializers.normal(0.02))
                out[name] = {"weight": made}
        return out

    def words(self, params: PyTree, tokens: Any) -> Float[Array, "B M d"]:
        """What the layer reads of `Pairs`: token and state, joined."""
        words = params["embed_tokens"]["weight"].astype(self.config.dtype)[tokens.tokens]
        return project(params["fc"], jnp.concatenate([words, tokens.states], axis=-1))

    def logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M V"]:
        """Logits of all pieces: minus infinity for what cannot be said."""
        known, vocab = self.known_logits(params, x), self.config.draft_vocab
        return known if vocab is None else vocab.whole(known)

    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        """The target's output layer on the head's states."""
        wide = np.promote_types(x.dtype, np.float32)
        return layers.linear(x, params["lm_head"]["weight"], wide)

    def begin(
        self, params: PyTree, prefilled: Prefilled, tap: str, slots: int
    ) -> tuple[Cache, Float[Array, "B 1 d"], Int[Array, "B"]]:
        """Cross-attention over the target's encoder output; no pair, since nothing was said yet.

        Of a forced prefix the head reads nothing: its first pair is that of the first token behind it.
        """
        del tap
        config, encoded = self.config, prefilled.taps["encoded"]
        batch, length = encoded.shape[:2]
        mask = jnp.arange(length, dtype=jnp.int32)[None] < prefilled.prompt.length[:, None]
        read = lambda _, layer, i: (None, cross_kv(config, layer, encoded))  # noqa: E731
        cross = caches.joined(stack.run(params["decoder"], read, None)[1])
        none = jnp.zeros(batch, jnp.int32)
        cache = Cache(self.empty_kv(batch, slots), none, cross, mask)
        return cache, jnp.zeros((batch, 1, config.emb_dim), config.dtype), none

    def read(
        self, params: PyTree, cache: Cache, block: Block, open: Open, at
    ) -> tuple[Float[Array, "B M d"], Open]:
        """(the states that stand for the pairs', the open slots with them); ``block.tokens`` are `Pairs`."""
        seen, open = self._behind(params, cache, block, open, at)
        return seen["last"], open

    def next_states(self, params: PyTree, pairs: Pairs, batch: dict) -> Float[Array, "B M d"]:
        """The same for whole texts of pairs; ``batch`` has ``encoded`` and ``input_mask``."""
        x = self.words(params, pairs)
        return self._teach(params, x, batch["encoded"], batch["input_mask"])["last"]

    def tile(self, params: PyTree) -> PyTree:
        tables = {name: params[name] for name in ("embed_tokens",) if name in params}
        return super().tile({n: x for n, x in params.items() if n not in tables}) | tables

    def taken(self, target: T5, params: PyTree) -> PyTree:
        """What a head takes from its target; see `specjax.models.eagle.Eagle.taken`."""
        c, theirs = self.config, target.config
        if (c.vocab_size, c.emb_dim, c.encoded_dim) != (
            theirs.vocab_size,
            theirs.emb_dim,
            theirs.emb_dim,
        ):
            raise ValueError(
                f"the head is for {c.vocab_size} pieces and width {c.emb_dim}, the target has "
                f"{theirs.vocab_size} and {theirs.emb_dim}"
            )
        output = layers.untile(target.output(params))
        if c.draft_vocab is not None:
            output = output[jnp.asarray(c.draft_vocab.ids)]
        table = params["token_embedder"]["embedding"]
        return {"embed_tokens": {"weight": table}, "lm_head": {"weight": output}}
