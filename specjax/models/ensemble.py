"""Several small models that draft beside each other: SpecInfer's SSMs.

Neighbours of one architecture are one group, whose parameters are piled up and which runs as one batch;
groups run one after the other. In all that goes in and out the models stand on the second axis, S, behind
the rows.

References:
  Miao et al. 2024, SpecInfer (2305.09781), section 3.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from specjax.decode.interfaces import Block, Model, Prefilled


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Small models with the target's vocabulary.

    Attributes:
      models: at least one, in the order in which their drafts are tried.
    """

    models: tuple[Model, ...]

    def __post_init__(self):
        object.__setattr__(self, "models", tuple(self.models))
        if not self.models:
            raise ValueError("an ensemble needs at least one model")

    @functools.cached_property
    def groups(self) -> tuple[tuple[Model, int], ...]:
        """Neighbours that are alike, and how many."""
        return tuple((model, len(list(same))) for model, same in itertools.groupby(self.models))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for model in self.models for name in model.reads))

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest text that all of them read."""
        ends = [getattr(model, "max_positions", None) for model in self.models]
        return min((end for end in ends if end is not None), default=None)

    def stack(self, params: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """One tree a group from one a model: models stand on the first axis of every array."""
        rest, out = list(params), []
        if len(rest) != len(self.models):
            raise ValueError(f"{len(self.models)} models and parameters of {len(rest)}")
        for _, count in self.groups:
            same, rest = rest[:count], rest[count:]
            out.append(jax.tree.map(lambda *x: jnp.stack(x), *same))
        return tuple(out)

    def prefill(self, params: tuple, target: Prefilled, slots: int) -> tuple:
        """The caches behind the prompt, each model taking what it shares with the target."""

        def read(model, own):
            shared = {name: target.taps[name] for name in model.reads}
            return model.prefill(own, target.prompt, slots, **shared).cache

        return tuple(
            jax.vmap(functools.partial(read, model), out_axes=1)(own)
            for (model, _), own in zip(self.groups, params, strict=True)
        )

    def open(self, batch: int, width: int) -> tuple:
        """Empty open slots of every model."""
        return tuple(
            jax.tree.map(
                lambda x, count=count: jnp.repeat(x[:, None], count, axis=1),
                model.open(batch, width),
            )
            for model, count in self.groups
        )

    def extend(
        self, params: tuple, caches: tuple, block: Block, opens: tuple, at=0, *, logits_from=0
    ) -> tuple[Float[Array, "B S M V"], tuple]:
        """Reads a block of tokens ``[B, M]``, or ``[B, S, M]`` of each model's own.

        Depths and masks are the same for all.

        Returns:
          (logits, open slots).
        """
        shared = block.tokens.ndim == 2
        logits, after, first = [], [], 0
        for (model, count), own, cache, open_ in zip(
            self.groups, params, caches, opens, strict=True
        ):

            def read(own, cache, tokens, open_, model=model):
                found = model.extend(
                    own, cache, block._replace(tokens=tokens), open_, at, logits_from=logits_from
                )
                return found.logits, found.open

            tokens = block.tokens if shared else block.tokens[:, first : first + count]
            words, open_ = jax.vmap(read, (0, 1, None if shared else 1, 1), 1)(
                own, cache, tokens, open_
            )
            logits.append(words)
            after.append(open_)
            first += count
        return jnp.concatenate(logits, axis=1), tuple(after)

    def commit(
        self, caches: tuple, opens: tuple, keep: Int[Array, "B K"], count: Int[Array, "B"]
    ) -> tuple:
        """Writes the same open slots behind every cache."""
        return tuple(
            jax.vmap(model.commit, (1, 1, None, None), 1)(cache, open_, keep, count)
            for (model, _), cache, open_ in zip(self.groups, caches, opens, strict=True)
        )

    def rewind(self, caches: tuple, length: Int[Array, "B"]) -> tuple:
        """Lowers the lengths of all caches."""
        return tuple(
            jax.vmap(model.rewind, (1, None), 1)(cache, length)
            for (model, _), cache in zip(self.groups, caches, strict=True)
        )

    def length(self, caches: tuple) -> Int[Array, "B"]:
        """Tokens in the caches, which is the same in all of them."""
        return caches[0].length[:, 0]
