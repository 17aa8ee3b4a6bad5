"""Sequence-based verification: every branch of a tree as a row of its own.

What was there before tree attention, kept for comparison. A node is read once for each branch that runs
through it, and every branch has its own copy of the cached keys and values.

References:
  Miao et al. 2024, SpecInfer (2305.09781), section 4.2 and figure 4 ("sequence-based decoding").
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.decode.interfaces import Block, Extended, Model, Open


@dataclasses.dataclass(frozen=True)
class Branches:
    """A target that reads a tree branch by branch; in all else it is ``model``.

    Attributes:
      model: the target.
      branches: R, leaves of a tree at most. Nodes that a drafter leaves unused are leaves too. What
        stands on none of the first R branches, or deeper, gets no law, which ends its row with an error.
      depth: P, the deepest path.
    """

    model: Model
    branches: int
    depth: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def extend(
        self, params, cache, block: Block, open: Open | None = None, at=0, *, taps=(), logits_from=0
    ) -> Extended:
        """Reads a block; one of a tree behind its root as ``branches`` rows of ``depth + 1`` tokens."""
        if open is not None or block.tokens.shape[1] == 1:
            return self.model.extend(
                params, cache, block, open, at, taps=taps, logits_from=logits_from
            )
        on = _branches(block, self.branches)
        several = jax.tree.map(lambda x: jnp.repeat(x, self.branches, axis=0), cache)
        read = self.model.extend(params, several, self._rows(block, on), taps=taps)
        row = on.argmax(1)  # the first branch through every token
        there = on.any(1) & (block.depth <= self.depth)
        apart = lambda x: x.reshape(on.shape[0], self.branches, *x.shape[1:])  # noqa: E731
        batch = jnp.arange(on.shape[0], dtype=jnp.int32)[:, None]
        pick = lambda x: apart(x)[batch, row, block.depth]  # noqa: E731

        def kept(x):
            """Keys or values ``[B R, ..., P + 1, D]`` of the block's tokens ``[B, ..., M, D]``."""
            return jnp.moveaxis(pick(jnp.moveaxis(x, -2, 1)), 1, -2)

        logits = jnp.where(there[..., None], pick(read.logits), jnp.nan)[:, logits_from:]
        given = Open(jax.tree.map(kept, read.open.kv), cache.length[:, None] + block.depth)
        return Extended(logits, {name: pick(x) for name, x in read.taps.items()}, given)

    def _rows(self, block: Block, on: Bool[Array, "B R M"]) -> Block:
        """Every branch as a causal block; behind its leaf it is garbage."""
        width, (batch, rows, _) = self.depth + 1, on.shape
        steps = jnp.arange(width, dtype=jnp.int32)
        here = on[..., None] & (block.depth[:, None, :, None] == steps[None, None, None])
        tokens = jnp.where(here, block.tokens[:, None, :, None], 0).sum(2, dtype=jnp.int32)
        count = batch * rows
        causal = jnp.asarray(np.tri(width, dtype=bool))
        return Block(
            tokens.reshape(count, width),
            jnp.broadcast_to(steps, (count, width)),
            jnp.broadcast_to(causal, (count, width, width)),
        )


def _branches(block: Block, count: int) -> Bool[Array, "B R M"]:
    """Which tokens stand on the way to each of the first ``count`` leaves."""
    size = block.tokens.shape[1]
    below = block.mask & ~jnp.asarray(np.eye(size, dtype=bool))[None]
    leaf = ~below.any(1)  # nothing descends from it
    rank: Int[Array, "B M"] = leaf.cumsum(1, dtype=jnp.int32) - 1
    which = leaf[:, None] & (rank[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :, None])
    return (which[..., None] & block.mask[:, None]).any(2)
