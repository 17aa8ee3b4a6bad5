"""Drafting from a unigram or bigram table of counted text: almost free, and seldom right.

References:
  Leviathan et al. 2023 (2211.17192), section 3.6 and table 3 ("trivial" approximation models).
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.decode import loop, processors, tree
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Params, Prefilled, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT
from specjax.drafters.stateless import Stateless


@dataclasses.dataclass(frozen=True)
class Ngram(Stateless):
    """A chain of ``gamma`` tokens from a table of log-probabilities, which is ``params.draft``.

    The table is float32 ``[V]`` (order 1) or ``[V, V]`` (order 2, a row per last token): 256 MB at
    a vocabulary of 8 thousand, 4 GB at 32 thousand. `unigram_table` and `bigram_table` count it.

    Attributes:
      order: 1 looks at nothing, 2 at the newest token.
      gamma: tokens per round, at least 1.
      sampled: draw from the table's law under the decode's own sampling; False takes its likeliest
        token, judged as a deterministic choice.
    """

    order: int = 2
    gamma: int = 3
    sampled: bool = True

    def __post_init__(self):
        if self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {self.gamma}; decode plainly for 0")
        if self.order not in (1, 2):
            raise ValueError(f"the order must be 1 or 2, got {self.order}")

    @property
    def depth(self) -> int:
        return self.gamma

    nodes, chain = depth, True

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> tuple:
        """No state: the text says all there is to know."""
        del prefilled, slots
        if params.draft.ndim != self.order:
            raise ValueError(
                f"order {self.order} needs a table of as many axes, got {params.draft.ndim}"
            )
        return ()

    def propose(
        self, params: Params, state: tuple, text: Text, sampling: Sampling, keys: Key[Array, "B"]
    ) -> tuple[TokenTree, tuple]:
        """Drafts a chain behind the newest token."""
        u = laws.uniform(laws.fold(keys, DRAFT), self.gamma)
        root = loop.newest(text)

        def step(carry, u_i):
            token, past = carry
            logits = self.logits(params.draft, token)[:, None]
            log_q = laws.log_law(logits, sampling, processors.history(past))[:, 0]
            best = laws.first_max(log_q)[:, 0]
            token = laws.draw(log_q, u_i.astype(log_q.dtype)) if self.sampled else best
            return (token, processors.remember(past, token)), (token, log_q)

        past = processors.recall(sampling.processors, text)
        _, (tokens, log_q) = lax.scan(step, (root, past), u.T)
        log_q = log_q.transpose(1, 0, 2) if self.sampled else None
        return tree.chain(tokens.T, jnp.ones_like(tokens.T, bool), log_q), state

    def logits(self, table: Array, previous: Int[Array, "*B"]) -> Float[Array, "*B V"]:
        """The table's rows behind these tokens."""
        if self.order == 2:
            return table[previous]
        return jnp.broadcast_to(table, (*previous.shape, table.shape[0]))


def unigram_table(
    tokens: np.ndarray, lengths: np.ndarray, vocab_size: int, smoothing: float = 1.0
) -> np.ndarray:
    """log u(x) = log (count(x) + s) - log (N + s V): additive smoothing.

    Args:
      tokens: int ``[rows, L]``: decoder texts without a start token, with their EOS.
      lengths: int ``[rows]``.
      vocab_size: V.
      smoothing: s, above 0 unless every token occurs.

    Returns:
      float32 ``[V]``.
    """
    inside = np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]
    count = np.bincount(np.asarray(tokens)[inside], minlength=vocab_size).astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.log((count + smoothing) / (count.sum() + smoothing * vocab_size)).astype(
            np.float32
        )


def bigram_table(
    tokens: np.ndarray,
    lengths: np.ndarray,
    vocab_size: int,
    smoothing: float = 1.0,
    start_id: int = 0,
) -> np.ndarray:
    """log q(x | y) = log (count(y, x) + s u(x)) - log (count(y) + s), u the unigram law.

    Bigrams are smoothed towards the unigram law of `unigram_table` with smoothing 1 (a Dirichlet
    prior of weight s), so a token never seen as y has the unigram law. A text's first token follows
    the start token.

    Args:
      tokens: int ``[rows, L]``, as for `unigram_table`.
      lengths: int ``[rows]``.
      vocab_size: V.
      smoothing: s, above 0.
      start_id: what stands before a text.

    Returns:
      float32 ``[V, V]``, row y.
    """
    if not (smoothing > 0 and math.isfinite(smoothing)):
        raise ValueError(f"smoothing must be above 0, got {smoothing}")
    tokens = np.asarray(tokens)
    inside = np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]
    before = np.concatenate([np.full_like(tokens[:, :1], start_id), tokens[:, :-1]], axis=1)
    pairs = before[inside].astype(np.int64) * vocab_size + tokens[inside]
    table = np.zeros(vocab_size * vocab_size, np.float32)
    seen, count = np.unique(pairs, return_counts=True)
    table[seen] = count
    table = table.reshape(vocab_size, vocab_size)
    total = table.sum(1, keepdims=True)
    table += np.float32(smoothing) * np.exp(unigram_table(tokens, lengths, vocab_size))[None]
    return np.log(table, out=table) - np.log(total + np.float32(smoothing))
