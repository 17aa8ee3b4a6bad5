"""Lookahead decoding: n-grams of the target's own Jacobi iterations, collected and tried in one step.

A step reads (W + G)(N - 1) tokens, the newest committed one (the root) among them. Two branches share it:

- The *window* guesses W tokens ahead on N - 1 levels, level j being the older the smaller j. Column i of
  level j stands at depth i + j; (0, 0) is the root, level 0 is a chain behind it, and (j, i) hangs under
  (j - 1, i). So the paper's two rules (a token sees level 0 up to its column, and its column on the levels
  between) are those of a tree, and row j W + i of the block is (j, i). What the target says behind the last
  level is the next level: a Jacobi iteration. Window tokens are read, never judged.
- *Guesses* are n-grams that begin with the root: up to G chains behind it, which are judged.

After the step, column i of all levels with what the target says behind them is a new n-gram, W of them in
all. They go into a pool; the oldest level is dropped, and the window moves on.

Guesses are deterministic choices: a function of text, prompt and window, which are given when the round
begins. Window tokens are the target's first maxima at any temperature, not its draws, and what fills new
columns is taken from the prompt without a random number. So no guess depends on the uniforms that judge it,
and trying each with all of q on itself is exact, whatever earlier rounds drew.

References:
  Santilli et al. 2023 (2305.10427) for Jacobi decoding; Fu et al. 2024 (2402.02057), section 3, and the
  released code (hao-ai-lab/LookaheadDecoding, ``lade/decoding.py``). Different there: levels are filled one
  by one in the first rounds (here all begin with tokens of the prompt, and n-grams are kept once these have
  left); the first tokens are drawn; the pool has no end and G n-grams per first token (here the last
  `Lookahead.pool` n-grams of all, of which the G newest are tried: the same ones while the pool is not
  full); an EOS in the window is replaced where it samples; a guess that is right to its end brings no bonus
  token; N = 2 is not possible.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from specjax.decode import loop, tree
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Outcome, Params, Prefilled, Prompt, Text, TokenTree
from specjax.decode.sampling import Sampling


class LookaheadState(NamedTuple):
    """Window and pool of every row.

    Attributes:
      window: int32 ``[B, N - 1, W]``; `propose` writes the root to (0, 0).
      pool: int32 ``[B, S, N]``: n-grams, the newest first; -1 where there are none yet.
      age: int32 ``[B]``: rounds so far.
      prompt: what new columns are filled from.
    """

    window: Int[Array, "B J W"]
    pool: Int[Array, "B S N"]
    age: Int[Array, "B"]
    prompt: Prompt


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Lookahead decoding. It has no parameters.

    With ``ngram`` 2 there are no n-grams to speak of: the one level that the window has is itself the
    guess and is judged, which is Jacobi decoding, W - 1 tokens ahead. The pool is not used then.

    Attributes:
      window: W, columns.
      ngram: N, tokens of an n-gram: a guess has N - 1 of them behind the root.
      guesses: G, n-grams tried per round; 0 where ``ngram`` is 2, and only there.
      pool: n-grams that are remembered per row.
      follow: the window moves with the text, by as many columns as a round has tokens, and new columns
        are filled from the prompt; False moves it by one, whatever was accepted, as the released code
        does. For ``ngram`` 2 it always follows.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    pool: int = 512
    follow: bool = False

    taps = ()
    reach = 0

    def __post_init__(self):
        if self.ngram < 2:
            raise ValueError(f"ngram must be at least 2, got {self.ngram}")
        if self.ngram == 2 and (self.guesses or self.window < 2):
            raise ValueError(
                "ngram 2 is Jacobi decoding: a window of at least 2, and guesses 0; got "
                f"{self.window} and {self.guesses}"
            )
        if self.ngram > 2 and min(self.window, self.guesses, self.pool) < 1:
            raise ValueError(
                "window, guesses and pool must be at least 1, got "
                f"{self.window}, {self.guesses} and {self.pool}"
            )

    @property
    def depth(self) -> int:
        """The window may be deeper than the guesses."""
        return max(self.ngram - 1, self.window + self.ngram - 3)

    @property
    def nodes(self) -> int:
        return (self.window + self.guesses) * (self.ngram - 1) - 1

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> LookaheadState:
        """A window of tokens of the prompt, and an empty pool."""
        del params, slots
        prompt = prefilled.prompt._replace(prefix=None)
        batch = prompt.length.shape[0]
        pool = jnp.full((batch, self.pool, self.ngram), -1, jnp.int32)
        age = jnp.zeros(batch, jnp.int32)
        return LookaheadState(self._filling(prompt, age), pool, age, prompt)

    def propose(
        self,
        params: Params,
        state: LookaheadState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, LookaheadState]:
        """The window, and beside it the newest n-grams of the pool that begin with the root."""
        del params, sampling, keys
        root = loop.newest(text)
        state = state._replace(window=state.window.at[:, 0, 0].set(root))
        tokens = state.window.reshape(root.shape[0], -1)[:, 1:]
        if self.ngram == 2:
            return tree.chain(tokens, jnp.ones_like(tokens, bool), None), state
        return self._beside(tokens, matches(state.pool, root, self.guesses)), state

    def observe(self, params: Params, state: LookaheadState, outcome: Outcome) -> LookaheadState:
        """Takes the next level from the target, n-grams into the pool, and moves the window."""
        del params
        live, filling = outcome.count > 0, self._filling(state.prompt, state.age + 1)
        said, sound = self._next_level(outcome)
        fresh = jnp.where(sound, said, filling[:, -1])[:, None]
        levels = jnp.concatenate([state.window, fresh], axis=1)  # [B, N, W]
        follow = self.follow or self.ngram == 2
        by = outcome.count - 1 if follow else jnp.zeros_like(outcome.count)
        window = jnp.where(live[:, None, None], _moved(levels[:, 1:], by, filling), state.window)
        pool = state.pool
        if self.ngram > 2:
            # Before that not all levels are the target's own words.
            kept = sound & (live & (state.age >= self.ngram - 2))[:, None]
            kept = kept.at[:, 0].set(kept[:, 0] & _rooted(outcome))
            pool = remember(pool, levels.transpose(0, 2, 1), kept)
        return LookaheadState(window, pool, state.age + live.astype(jnp.int32), state.prompt)

    def rewind(self, state: LookaheadState, length: Int[Array, "B"]) -> LookaheadState:
        """Nothing to forget: window and pool are guesses, right or not."""
        del length
        return state

    def _filling(self, prompt: Prompt, age: Int[Array, "B"]) -> Int[Array, "B J W"]:
        """Tokens from scattered places of the prompt, other ones at every age."""
        shape = (self.ngram - 1, self.window)
        cell = jnp.arange(shape[0] * shape[1], dtype=jnp.int32)[None]
        number = (age[:, None] * cell.size + cell).astype(jnp.uint32)
        scattered = (number * jnp.uint32(2654435761)) >> 16  # Knuth's multiplicative hash
        place = scattered % jnp.maximum(prompt.length, 1).astype(jnp.uint32)[:, None]
        tokens = jnp.take_along_axis(prompt.tokens, place.astype(jnp.int32), axis=1)
        return tokens.reshape(-1, *shape)

    def _above(self) -> Int[np.ndarray, " N"]:
        """The parents of the window's nodes."""
        level, column = np.divmod(np.arange(1, self.window * (self.ngram - 1)), self.window)
        row = np.where(level == 0, column - 1, (level - 1) * self.window + column)
        return (row - 1).astype(np.int32)  # node i is row i + 1 of the block

    def _beside(self, tokens: Int[Array, "B K"], guesses: Int[Array, "B G L"]) -> TokenTree:
        """Window and guesses under one root.

        Guesses with a common beginning share its nodes, so that the longest right one is found by any
        rule that asks each node once.
        """
        batch, count = tokens.shape
        equal = jnp.zeros(guesses.shape[:2], jnp.float32)
        tried = tree.merge(guesses, equal, guesses.shape[1] * guesses.shape[2])
        parent = jnp.where(tried.parent < 0, -1, tried.parent + count)
        above = jnp.broadcast_to(jnp.asarray(self._above()), (batch, count))
        join = lambda a, b: jnp.concatenate([a, b], axis=1)  # noqa: E731
        parent, read = join(above, parent), jnp.ones_like(tokens, bool)
        return TokenTree(
            tokens=join(tokens, tried.tokens),
            parent=parent,
            valid=join(read, tried.valid),
            judged=join(~read, tried.judged),
            log_q=None,
            q_row=jnp.full_like(parent, -1),
            depth=self.depth,
        )

    def _next_level(self, outcome: Outcome) -> tuple[Int[Array, "B W"], Bool[Array, "B W"]]:
        """The target's first maxima behind the last level, and which of them are any.

        Not where a node lies beyond the length limit, nor where the law is broken.
        """
        rows = slice((self.ngram - 2) * self.window, (self.ngram - 1) * self.window)
        log_p = outcome.log_p[:, rows]
        read = jnp.pad(outcome.tree.valid, ((0, 0), (1, 0)), constant_values=True)[:, rows]
        return log_p.argmax(-1).astype(jnp.int32), read & ~laws.broken(log_p)


def matches(pool: Int[Array, "B S N"], root: Int[Array, "B"], most: int) -> Int[Array, "B G L"]:
    """What follows the root in the newest n-grams that begin with it; -1 where there are fewer."""
    batch, _, size = pool.shape
    found = pool[:, :, 0] == root[:, None]
    rank = found.cumsum(1, dtype=jnp.int32) - 1
    at = jnp.where(found, rank, most)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return (
        jnp.full((batch, most, size - 1), -1, jnp.int32)
        .at[row, at]
        .set(pool[:, :, 1:], mode="drop")
    )


def remember(
    pool: Int[Array, "B S N"], ngrams: Int[Array, "B W N"], kept: Bool[Array, "B W"]
) -> Int[Array, "B S N"]:
    """The pool with new n-grams, the last column's first; one that is there already becomes new.

    What no longer fits is forgotten, the oldest first.
    """
    batch, size, _ = pool.shape
    new = jnp.where(kept[..., None], ngrams, -1)[:, ::-1]
    alike = lambda a, b: (a[:, :, None] == b[:, None]).all(-1)  # noqa: E731
    later = jnp.asarray(np.tri(new.shape[1], k=-1, dtype=bool))
    again = jnp.concatenate(
        [(alike(new, new) & later[None]).any(2), alike(pool, new).any(2)], axis=1
    )
    both = jnp.concatenate([new, pool], axis=1)
    there = (both[:, :, 0] >= 0) & ~again
    at = jnp.where(there, there.cumsum(1, dtype=jnp.int32) - 1, size)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.full_like(pool, -1).at[row, at].set(both, mode="drop")


def _moved(
    window: Int[Array, "B J W"], by: Int[Array, "B"], filling: Int[Array, "B J W"]
) -> Int[Array, "B J W"]:
    """The window ``by`` columns on, new columns filled."""
    width = window.shape[2]
    column = jnp.arange(width, dtype=jnp.int32)[None] + by[:, None]
    inside = ((column >= 0) & (column < width))[:, None]
    at = jnp.clip(column, 0, width - 1)[:, None]
    return jnp.where(inside, jnp.take_along_axis(window, at, axis=2), filling)


def _rooted(outcome: Outcome) -> Bool[Array, "B"]:
    """Whether the round's root was a word of the text, not the start token."""
    text = outcome.text
    return text.length - outcome.count - 1 >= text.first
