"""SpecInfer: trees that small models expand, each one its own, merged into one.

Every model drafts a tree of the same shape. Where two of them say the same, the later one's node is a
repeat: it stays as a trial, as every draw must, but is not read again, and what hangs below it hangs below
the first one. What a model expands behind a token is drawn from its own law there, whoever else said that
token, so the text keeps the target's law.

References:
  Miao et al. 2024, SpecInfer (2305.09781), section 3 (expansion- and merge-based trees) and definition 3.2.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode import sampling as laws
from specjax.decode import tree as trees
from specjax.decode.interfaces import Block, Model, Outcome, Params, Prefilled, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT
from specjax.drafters import levels
from specjax.drafters.small_model import within
from specjax.models.ensemble import Ensemble


class SpecInferState(NamedTuple):
    """Caches of the small models. They lack the newest tokens of the text: those of the last round.

    Attributes:
      caches: of every group of models, ``[B, S, ...]``.
      open: this round's block and trees, between `propose` and `observe`.
    """

    caches: tuple
    open: tuple


@dataclasses.dataclass(frozen=True)
class SpecInfer(levels.StaticTree):
    """A tree of every small model, merged.

    Logit processors shape the target's law alone.

    Attributes:
      model: the small models, or one of them alone; ``params.draft`` is what `Ensemble.stack` makes of
        theirs, or that one's own parameters.
    """

    model: Ensemble | Model

    @functools.cached_property
    def ensemble(self) -> Ensemble:
        return self.model if isinstance(self.model, Ensemble) else Ensemble((self.model,))

    @property
    def nodes(self) -> int:
        return len(self.ensemble.models) * self.template.nodes

    @property
    def taps(self) -> tuple[str, ...]:
        return self.ensemble.reads

    @property
    def reach(self) -> int:
        """Slots past the target's: a block of unread tokens is as wide as a round can be long."""
        return self.depth + 1

    @functools.cached_property
    def _levels(self) -> list[levels.Level]:
        return levels.plan(self.template)

    @property
    def _slots(self) -> int:
        """Open slots: the unread tokens, then every node that is read."""
        return self.depth + 1 + levels.inner(self.template)

    def _params(self, params: Params) -> tuple:
        return params.draft if self.model is self.ensemble else self.ensemble.stack([params.draft])

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> SpecInferState:
        caches = self.ensemble.prefill(self._params(params), prefilled, slots)
        batch = prefilled.text.length.shape[0]
        return SpecInferState(caches, self.ensemble.open(batch, self._slots))

    def propose(
        self,
        params: Params,
        state: SpecInferState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, SpecInferState]:
        """Reads what the caches lack, then every level's nodes that have children."""
        keys, own = laws.fold(keys, DRAFT), self._params(params)
        unread, count = self.depth + 1, len(self.ensemble.models)
        lag = text.length - self.ensemble.length(state.caches)
        slot = jnp.arange(self._slots, dtype=jnp.int32)[None]
        of_text = (slot >= unread - lag[:, None]) & (slot < unread)
        block = _newest(text, lag, unread, of_text)
        logits, open_ = self.ensemble.extend(
            own, state.caches, block, state.open, logits_from=self.depth
        )
        words, there, log_q = [], [], []
        for depth, level in enumerate(self._levels):
            if depth:
                tokens = words[-1][:, :, level.drafted]
                place = jnp.broadcast_to((lag - 1 + depth)[:, None], tokens[:, 0].shape)
                block = Block(tokens, place, jnp.asarray(level.mask)[None] | of_text[:, None])
                logits, open_ = self.ensemble.extend(own, state.caches, block, open_, level.at)
            batch, _, read, size = logits.shape
            found = levels.children(
                logits.reshape(batch, count * read, size),
                None,
                int(level.rank.max()) + 1,
                sampling,
                laws.fold(keys, depth) if self.draws else None,
            )
            apart = lambda x, read=read: x.reshape(x.shape[0], count, read, -1)  # noqa: E731
            words.append(apart(found.tokens)[:, :, level.parent, level.rank])
            there.append(apart(found.there)[:, :, level.parent, level.rank])
            log_q.append(apart(found.log_q) if self.draws else None)
        near = within(self.ensemble, text, self.depth)[:, self.template.levels - 1]
        there = jnp.concatenate(there, axis=2) & near[:, None]
        log_q = jnp.concatenate(log_q, axis=2) if self.draws else None
        law = np.concatenate([level.law for level in self._levels])
        tokens = jnp.concatenate(words, axis=2)
        return self._beside(tokens, there, found.drawn, log_q, law), state._replace(open=open_)

    def _beside(
        self,
        tokens: Int[Array, "B S N"],
        there: Bool[Array, "B S N"],
        drawn: Bool[Array, "B"],
        log_q: Float[Array, "B S Q V"] | None,
        law: Int[np.ndarray, " N"],
    ) -> TokenTree:
        """The models' trees as one, in their order."""
        batch, count, nodes = tokens.shape
        flat = lambda x: x.reshape(batch, -1, *x.shape[3:])  # noqa: E731
        valid = self.template.chosen(tokens.reshape(-1, nodes), there.reshape(-1, nodes)).valid
        nth = np.arange(count, dtype=np.int32)[:, None]
        up = self.template.parents
        parent = np.where(up < 0, -1, up + nth * nodes).reshape(-1)
        row = np.full(parent.size, -1, np.int32)
        if log_q is not None:
            row = (law + nth * log_q.shape[2]).reshape(-1).astype(np.int32)
        tree = TokenTree(
            tokens=flat(tokens),
            parent=jnp.broadcast_to(jnp.asarray(parent, jnp.int32), (batch, count * nodes)),
            valid=valid.reshape(batch, -1),
            judged=valid.reshape(batch, -1),
            log_q=None if log_q is None else flat(log_q),
            q_row=jnp.where(drawn[:, None], jnp.asarray(row)[None], -1),
            depth=self.depth,
            replace=False,
            chain=self.chain,
        )
        return trees.share_repeats(tree) if count > 1 else tree

    def observe(self, params: Params, state: SpecInferState, outcome: Outcome) -> SpecInferState:
        """Commits what was read of the text; the round's tokens are read next."""
        del params
        lag = outcome.text.length - outcome.count - self.ensemble.length(state.caches)
        slots = jnp.arange(self.depth + 1, dtype=jnp.int32)[None]
        keep = jnp.minimum(slots + (self.depth + 1 - lag)[:, None], self.depth)
        count = jnp.where(outcome.count > 0, lag, 0)
        return state._replace(caches=self.ensemble.commit(state.caches, state.open, keep, count))

    def rewind(self, state: SpecInferState, length: Int[Array, "B"]) -> SpecInferState:
        return state._replace(caches=self.ensemble.rewind(state.caches, length - 1))


def _newest(text: Text, lag: Int[Array, "B"], width: int, seen: Bool[Array, "B W"]) -> Block:
    """The last ``width`` tokens of a text, of which a row's last ``lag`` are not cached yet.

    Those before them are seen by nothing but themselves.
    """
    index = np.arange(width, dtype=np.int32)[None]
    at = jnp.maximum(text.length[:, None] - width + index, 0)
    tokens = jnp.take_along_axis(text.tokens, at, axis=1)
    depth = jnp.maximum(lag[:, None] - width + index, 0)
    own = np.eye(width, seen.shape[1], dtype=bool)[None]
    causal = np.tri(width, seen.shape[1], dtype=bool)[None]
    return Block(tokens, depth, own | (causal & seen[:, None]))
