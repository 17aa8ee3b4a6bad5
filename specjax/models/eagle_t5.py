"""EAGLE's head for T5: a decoder layer of its own that reads the target's encoder output too.

No such head was published. It is `specjax.models.eagle` with T5's layer as it is: pairs of state and token,
and no norm behind the last layer. States are those behind ``decoder_norm``; a tied output layer's d^-1/2 is
in the weight that the head takes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from specjax.decode.interfaces import Prefilled
from specjax.models import cache as caches
from specjax.models import heads, stack
from specjax.models.cache import Cache
from specjax.models.draft_vocab import DraftVocab
from specjax.models.eagle import EagleParts, Pairs
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
        object.__setattr__(self, "draft_vocab", heads.checked(self))
        if self.encoded_dim is None:
            raise ValueError("a head reads its target's encoder output: set encoded_dim")


@dataclasses.dataclass(frozen=True)
class EagleT5(EagleParts, T5):
    """The head, with the caches of a decoder. Static: parameters are passed in."""

    config: EagleT5Config

    # What it reads of the target's prefill.
    reads = ("encoded",)

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter."""
        decoder = dict(super().table()["decoder"])
        for name in ("decoder_norm", "logits_dense"):
            decoder.pop(name, None)
        return {"decoder": decoder} | self.parts()

    def words(self, params: PyTree, tokens: Any) -> Float[Array, "B M d"]:
        """`join`, of the `Pairs` that stand for tokens here."""
        return self.join(params, tokens)

    def begin(
        self, params: PyTree, prefilled: Prefilled, slots: int
    ) -> tuple[Cache, Float[Array, "B 1 d"], Int[Array, "B"]]:
        """Cross-attention over the target's encoder output; no pair, since nothing was said yet.

        Of a forced prefix the head reads nothing: its first pair is that of the first token behind it.
        """
        config, encoded = self.config, prefilled.taps["encoded"]
        batch, length = encoded.shape[:2]
        mask = jnp.arange(length, dtype=jnp.int32)[None] < prefilled.prompt.length[:, None]
        read = lambda _, layer, i: (None, cross_kv(config, layer, encoded))  # noqa: E731
        cross = caches.joined(stack.run(params["decoder"], read, None)[1])
        none = jnp.zeros(batch, jnp.int32)
        cache = Cache(self.empty_kv(batch, slots), none, cross, mask)
        return cache, jnp.zeros((batch, 1, config.emb_dim), config.dtype), none

    def next_states(self, params: PyTree, pairs: Pairs, batch: dict) -> Float[Array, "B M d"]:
        """The same for whole texts of pairs; ``batch`` has ``encoded`` and ``input_mask``."""
        x = self.words(params, pairs)
        return self._teach(params, x, batch["encoded"], batch["input_mask"])["last"]

    def tile(self, params: PyTree) -> PyTree:
        tables = {name: params[name] for name in ("embed_tokens",) if name in params}
        return super().tile({n: x for n, x in params.items() if n not in tables}) | tables

    def taken(self, target: T5, params: PyTree) -> PyTree:
        """What a head takes from its target; see `specjax.models.eagle.Eagle.taken`."""
        heads.check_target(self.config, target)
        if not isinstance(target, T5) or self.config.encoded_dim != target.config.emb_dim:
            raise ValueError(
                f"the head reads a T5's encoder output of width {self.config.encoded_dim}, which this "
                f"{type(target).__name__} of width {target.config.emb_dim} does not have"
            )
        output = heads.output_rows(self.config, target, params)
        return {"embed_tokens": {"weight": params["token_embedder"]["embedding"]},
                "lm_head": {"weight": output}}  # fmt: skip
