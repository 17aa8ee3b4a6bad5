"""The papers' own alpha: E[sum_x min(p, q)] over text that the target generated, teacher-forced.

`Stats.overlap` measures the same sum where drafts were tested, which weighs positions by how often
drafting came to them. This is the published measure, and needs no speculative decode at all.

References:
  Leviathan et al. 2023 (2211.17192), corollary 3.6, section 4.2 and table 3.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from specjax.decode import processors, tree
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Block, Model, Prefilled, Prompt
from specjax.decode.loop import given, newest
from specjax.decode.sampling import Sampling
from specjax.drafters import small_model
from specjax.drafters.ngram import Ngram


class Alpha(NamedTuple):
    """Sums over positions, so that batches can be added; ``value`` is their mean.

    Attributes:
      overlap: ``[B]``: sum over a row's positions of sum_x min(p, q).
      positions: int32 ``[B]``.
    """

    overlap: Float[Array, "B"]
    positions: Int[Array, "B"]

    @property
    def value(self) -> float | None:
        """alpha; None over no position."""
        count = int(np.sum(self.positions))
        return float(np.sum(self.overlap)) / count if count else None


@functools.partial(jax.jit, static_argnums=(0, 2))
def alpha(
    model: Model,
    params: PyTree,
    draft: Model | Ngram,
    draft_params: PyTree,
    prompt: Prompt,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    sampling: Sampling,
) -> Alpha:
    """alpha of a draft on texts, which the target should have generated under the same sampling.

    Args:
      model: the target.
      params: its parameters.
      draft: a draft model, or an n-gram drafter.
      draft_params: its parameters or table.
      prompt: what the texts answer.
      tokens: `Decoded.tokens` of the target.
      lengths: `Decoded.lengths`; EOS counts as a position, as it does in a decode.
      sampling: of both laws, in `Sampling.rows` form.

    Returns:
      Sums per row. Each text is read in one block: ``[B, T, V]`` logits of both.
    """
    taps, slots = () if isinstance(draft, Ngram) else draft.reads, _slots(prompt, tokens)
    read = model.prefill(params, prompt, slots, taps=taps)
    log_p = teacher_forced(model, params, read, tokens, sampling)
    if isinstance(draft, Ngram):
        log_q = _ngram_law(draft, draft_params, read.text, tokens, sampling)
    else:
        own = small_model.prefill(draft, draft_params, read, slots)
        log_q = teacher_forced(draft, draft_params, own, tokens, sampling)
    inside = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    both = jnp.exp(jnp.minimum(log_p, log_q.astype(log_p.dtype))).sum(-1)
    return Alpha(jnp.where(inside, both, 0.0).sum(1), lengths)


def teacher_forced(
    model: Model, params: PyTree, prefilled: Prefilled, tokens: Array, sampling: Sampling
) -> Float[Array, "B T V"]:
    """The sampling law before each token of texts ``[B, T]`` that follow a prefill."""
    root = newest(prefilled.text)
    chain = tree.chain(tokens, jnp.ones_like(tokens, bool), None)
    whole = tree.block(chain, root)
    block = Block(*(x[:, :-1] for x in whole[:2]), whole.mask[:, :-1, :-1])
    logits = model.extend(params, prefilled.cache, block).logits
    return _law(logits, prefilled.text, chain, sampling)


def _ngram_law(draft: Ngram, table, text, tokens, sampling) -> Array:
    previous = jnp.concatenate([newest(text)[:, None], tokens[:, :-1]], axis=1)
    chain = tree.chain(tokens, jnp.ones_like(tokens, bool), None)
    return _law(draft.logits(table, previous), text, chain, sampling)


def _law(logits, text, chain, sampling: Sampling) -> Array:
    past = processors.recall(sampling.processors, given(text))
    history = processors.history(past, chain)
    if history is not None:
        history = history._replace(tokens=history.tokens[:, :-1], length=history.length[:, :-1])
    return laws.log_law(logits, sampling, history)


def _slots(prompt: Prompt, tokens: Array) -> int:
    forced = 0 if prompt.prefix is None else prompt.prefix.tokens.shape[1]
    return forced + tokens.shape[1] + 2
