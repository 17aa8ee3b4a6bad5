"""REST: drafting what followed the text's last tokens in a datastore.

The longest end of the text that the store holds is looked up in a suffix array, on the device; what
stands behind its occurrences becomes a tree of its commonest beginnings.

References:
  He et al. 2023 (2311.08252), section 3. The authors' code looks for 16 tokens down to 2, reads the first
  5,000 occurrences in the array's order, 10 tokens of each, and drafts 64 nodes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Key

from specjax.decode import tree
from specjax.decode.interfaces import Params, Prefilled, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.drafters.stateless import Stateless

# Weights 2^i of the first words that differ must fit 32 bits.
LONGEST = 30


class Store(NamedTuple):
    """A datastore on the device, `specjax.data.datastore`'s arrays: Z parts of T tokens each.

    Parts are searched side by side, so devices may hold some each: see `specjax.infer.system.Datastore`.

    Attributes:
      tokens: int32 ``[Z, T]``: documents, each with a -1 behind it; the last of a part is a -1.
      suffixes: int32 ``[Z, T]``: the places of a part's tokens, in the order of what stands there.
    """

    tokens: Int[Array, "Z T"]
    suffixes: Int[Array, "Z T"]


@dataclasses.dataclass(frozen=True)
class Rest(Stateless):
    """A tree of what the store, which is ``params.draft``, has behind the text's longest known end.

    The end is the longest of ``max_match`` to ``min_match`` tokens with anything behind it; where there
    is none nothing is drafted. Of its occurrences ``retrieved`` are read, evenly spread over the array's
    order, which is that of what follows: so rare and common continuations keep their shares, where
    the first so many would all begin alike. A node weighs as many occurrences as go through it, and the
    heaviest ``nodes`` are drafted; of equal ones the higher.

    Attributes:
      max_match, min_match: tokens of the text to look for.
      retrieved: occurrences that are read at most. Making their tree takes time with its square.
      depth: tokens that are read behind each.
      nodes: size of the tree.
    """

    max_match: int = 16
    min_match: int = 2
    retrieved: int = 64
    depth: int = 10
    nodes: int = 64

    def __post_init__(self):
        if not 1 <= self.min_match <= self.max_match <= LONGEST:
            raise ValueError(
                f"a match has 1 to {LONGEST} tokens, min_match at most max_match; got "
                f"{self.min_match} to {self.max_match}"
            )
        for name in ("retrieved", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.nodes < self.depth:
            raise ValueError(f"{self.nodes} nodes are too few for a path of {self.depth}")

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> tuple:
        """No state: the text says all there is to know."""
        del prefilled, slots
        if not isinstance(params.draft, Store):
            raise ValueError("REST drafts from a datastore: draft_params must be a rest.Store")
        return ()

    def propose(
        self, params: Params, state: tuple, text: Text, sampling: Sampling, keys: Key[Array, "B"]
    ) -> tuple[TokenTree, tuple]:
        """Drafts deterministically, whatever the sampling."""
        del sampling, keys
        found = self.continuations(params.draft, text)
        weights = (found[..., 0] >= 0).astype(jnp.float32)
        return tree.merge(found, weights, self.nodes, by_prefix=True), state

    def continuations(self, store: Store, text: Text) -> Int[Array, "B R P"]:
        """What follows the text's longest known end, for `retrieved` occurrences; -1 behind the end."""
        sizes = np.arange(self.max_match, self.min_match - 1, -1, dtype=np.int32)
        words, there = ends(text, sizes)
        low, count = jax.vmap(lambda *part: occurrences(*part, words, sizes))(*store)
        most = (2**31 - 1) // count.shape[0]  # so that their sum fits
        count = jnp.where(there[None], jnp.minimum(count, most), 0)
        best = (count.sum(0, dtype=jnp.int32) > 0).argmax(1)  # the first is the longest
        pick = lambda x: jnp.take_along_axis(x, best[None, :, None], axis=2)[..., 0]  # noqa: E731
        low, count, size = pick(low), pick(count), jnp.asarray(sizes)[best]
        index = spread(count.sum(0, dtype=jnp.int32), self.retrieved)  # parts one after the other
        own = index[None] - (count.cumsum(0, dtype=jnp.int32) - count)[..., None]
        mine = (index >= 0)[None] & (own >= 0) & (own < count[..., None])
        read = jax.vmap(lambda *part: behind(*part, size, self.depth))
        tokens = read(*store, low[..., None] + own)
        return jnp.where(mine[..., None], tokens + 1, 0).sum(0, dtype=jnp.int32) - 1


def ends(
    text: Text, sizes: Int[np.ndarray, " Q"]
) -> tuple[Int[Array, "B Q W"], Bool[Array, "B Q"]]:
    """The text's last tokens for each size (garbage behind them), and whether it has so many."""
    first = jnp.zeros_like(text.length) if text.first is None else text.first
    index = np.arange(sizes.max() + 1, dtype=np.int32)[None] - sizes[:, None]
    index = jnp.maximum(text.length[:, None, None] + jnp.asarray(index)[None], 0)
    words = jnp.take_along_axis(text.tokens[:, None], index, axis=2, mode="clip")
    return words, (text.length - first)[:, None] >= jnp.asarray(sizes)[None]


def occurrences(
    tokens: Int[Array, "T"],
    suffixes: Int[Array, "T"],
    words: Int[Array, "B Q W"],
    sizes: Int[np.ndarray, " Q"],
) -> tuple[Int[Array, "B Q"], Int[Array, "B Q"]]:
    """Where in the array the suffixes begin that start with ``words[:size]`` and go on, and how many.

    Both ends by bisection, for the words with the smallest and with a too large token behind them. A
    -1 is below both: of an occurrence at a document's end nothing can be read.
    """
    place = np.arange(words.shape[-1], dtype=np.int32)[None, None, None]
    sizes = sizes[None, :, None, None]
    bound = np.asarray([0, 2**31 - 1], np.int32)[None, None, :, None]
    sought = jnp.where(place == sizes, bound, words[:, :, None])
    # Sums of 2^i have the sign of their first term, as the order of words has.
    weight = np.where(place <= sizes, 2 ** (LONGEST - place), 0).astype(np.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        at = suffixes.at[middle].get(mode="clip")[..., None] + place
        read = tokens.at[at].get(mode="clip")
        before = (jnp.sign(read - sought) * weight).sum(-1, dtype=jnp.int32) < 0
        going = low < high
        low = jnp.where(going & before, middle + 1, low)
        return low, jnp.where(going & ~before, middle, high)

    size = tokens.shape[0]
    start = jnp.zeros(sought.shape[:-1], jnp.int32)
    found, _ = lax.fori_loop(0, size.bit_length(), halve, (start, start + size))
    return found[..., 0], found[..., 1] - found[..., 0]


def spread(count: Int[Array, "B"], most: int) -> Int[Array, "B R"]:
    """The numbers 0 to count - 1, or ``most`` of them at equal distances; -1 behind them."""
    step = jnp.arange(most, dtype=jnp.int32)[None]
    count = count[:, None]
    # step * count / most, without leaving 32 bits
    far = step * (count // most) + step * (count % most) // most
    return jnp.where(step < count, jnp.where(count > most, far, step), -1)


def behind(
    tokens: Int[Array, "T"],
    suffixes: Int[Array, "T"],
    at: Int[Array, "B R"],
    size: Int[Array, "B"],
    depth: int,
) -> Int[Array, "B R P"]:
    """The tokens that follow ``size`` tokens, for places in the array; -1 from a document's end on."""
    place = suffixes.at[at].get(mode="clip") + size[:, None]
    read = place[..., None] + jnp.arange(depth, dtype=jnp.int32)[None, None]
    found = tokens.at[read].get(mode="clip")
    inside = jnp.cumprod(found >= 0, axis=-1, dtype=jnp.int32) > 0
    return jnp.where(inside, found, -1)
