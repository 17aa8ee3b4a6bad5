"""A trie of n-grams that were seen: the prompt's, this output's, and those of earlier outputs.

The trie is implicit: what is kept are the texts, a round looks for its newest tokens in them, and what
stands behind all the places where they are is the subtree below them; a node's frequency is the number of
places that lead to it.

References:
  Zhao et al. 2024, Lookahead (2312.12728), sections 4.1 to 4.3, and its code
  (github.com/alipay/PainlessInferenceAcceleration, lookahead_cache.py).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode import tree
from specjax.decode.interfaces import Params, Prefilled, Prompt, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.drafters import suffixes
from specjax.drafters.stateless import Stateless
from specjax.drafters.suffixes import NOTHING

HIERARCHICAL, PARALLEL, SINGLE = MODES = ("hierarchical", "parallel", "single")
# Above every sum of frequencies.
FIRST = 1e6


class Store(NamedTuple):
    """What is known of earlier outputs: nothing but what the caller has put in by `absorb`.

    Attributes:
      tokens: int32 ``[C]``, the newest last, -1 between texts and where there is none yet.
    """

    tokens: Int[Array, "C"]


def empty(capacity: int = 4096) -> Store:
    """A store without a text, with room for this many tokens (and a gap per text)."""
    return Store(jnp.full(capacity, NOTHING, jnp.int32))


@jax.jit
def absorb(store: Store, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Store:
    """The store with these texts in it, row by row; the oldest tokens fall out.

    Args:
      store: stays as it is.
      tokens: `Decoded.tokens`, or any other texts in the target's vocabulary.
      lengths: 0 of a row that is none.
    """
    steps, capacity = tokens.shape[1], store.tokens.shape[0]
    index = jnp.arange(steps + 1, dtype=jnp.int32)[None]
    texts = jnp.where(index < lengths[:, None], jnp.pad(tokens, ((0, 0), (0, 1))), NOTHING).reshape(
        -1
    )
    kept = (index <= lengths[:, None]) & (lengths[:, None] > 0)  # a gap behind each text
    after = jnp.flip(jnp.flip(kept.reshape(-1)).cumsum(dtype=jnp.int32))
    new = after[0]
    # What is kept is moved down until the last of it stands last.
    old = jnp.arange(capacity, dtype=jnp.int32) - new
    moved = (
        jnp.full(capacity, NOTHING, jnp.int32)
        .at[jnp.where(old >= 0, old, capacity)]
        .set(store.tokens, mode="drop")
    )
    at = jnp.where(kept.reshape(-1) & (after <= capacity), capacity - after, capacity)
    return Store(moved.at[at].set(texts.astype(jnp.int32), mode="drop"))


@dataclasses.dataclass(frozen=True)
class Trie(Stateless):
    """Proposes what stands behind the newest tokens in prompt, output and store, by frequency.

    A node weighs (1 - ``weight``) times its frequency in the prompt plus ``weight`` times that in this
    output and in the store. The longest suffix is taken of the ``max_match`` newest tokens that has ``depth``
    - 1 nodes below it (``depth`` // 2 - 1 if `mode` is single), or else the shortest there is.

    ``params.draft`` is the `Store`, or None. A decode reads it and writes nothing: what one decode says
    gets into another only by the caller's hand, ::

        store = trie.empty()
        out = generate(model, params, prompt, drafter=Trie(), draft_params=store, max_decode_len=64)
        store = trie.absorb(store, out.tokens, out.lengths)

    Deliberate differences from the authors' code: places are counted from the moment a token stands behind
    them, where the code waits for a whole branch; a store forgets its oldest tokens, where the code halves
    frequencies; of very frequent suffixes not all places are counted (``places``); branches that begin
    alike are one branch to a verifier, in parallel too; and single follows the same weights as the others.

    Attributes:
      mode: "hierarchical" is one tree of the heaviest nodes; "parallel" the heaviest whole sequences, each
        paid for with its full length, as if nothing were shared; "single" the heaviest branch.
      depth: the paper's branch length.
      budget: nodes; the paper's decoding length counts the root too (so its 64 are 63 here).
      weight: of this and of earlier outputs, 0 to 1; 0 leaves them out, and 1 the prompt.
      outputs: nodes of the budget for the most frequent of outputs, whatever they weigh ("hierarchical").
      max_match: the most newest tokens that are looked for.
      places: how many places are looked at, those of longer matches first, then newer ones: of this
        output, then of the prompt, then of the store.
      eos_id: the target's, one or several; -1 for none. Nothing behind one is proposed.
    """

    mode: str = HIERARCHICAL
    depth: int = 12
    budget: int = 63
    weight: float = 1e-4
    outputs: int = 32
    max_match: int = 2
    places: int = 64
    eos_id: int | tuple[int, ...] = 1

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"the mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"the weight must lie in 0 .. 1, got {self.weight}")
        for name, least in (
            ("depth", 1), ("budget", 1), ("outputs", 0), ("max_match", 1), ("places", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.budget < self.depth:
            raise ValueError(f"a budget of {self.budget} nodes for branches of {self.depth}")

    @property
    def nodes(self) -> int:
        return self.depth if self.mode == SINGLE else self.budget

    @property
    def enough(self) -> int:
        """Nodes below a suffix at which no shorter one is asked."""
        return (self.depth // 2 if self.mode == SINGLE else self.depth) - 1

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> Prompt | tuple[()]:
        """The encoder's input; a decoder-only model's prompt stands in the text."""
        del params, slots
        return suffixes.reference(prefilled)

    def propose(
        self,
        params: Params,
        state: Prompt | tuple[()],
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, Prompt | tuple[()]]:
        """The subtree below the newest tokens, in the drafter's mode."""
        del sampling, keys
        tokens, output = self.known(params.draft, state, text)
        length = suffixes.matches(tokens, suffixes.newest(text, self.max_match), self.eos_id)
        length = jnp.where(self.counts(output), length, 0)
        length, at = suffixes.longest(length, self.max_match, self.places)
        branches = suffixes.behind(tokens, at, self.depth, self.eos_id)
        keep = lambda which: jnp.where(which[..., None], branches, NOTHING)  # noqa: E731
        branches = keep(length > 0)
        branches = keep(length >= self.long_enough(branches, length)[:, None])
        # What follows a place says whose n-gram it is.
        output = jnp.take_along_axis(jnp.pad(output, ((0, 0), (0, 1))), at + 1, axis=1)
        if self.mode == SINGLE:
            return heaviest_branch(branches, self.weigh(output)), state
        if self.mode == PARALLEL:
            return whole_branches(branches, self.weigh(output), self.budget), state
        return self.heaviest_nodes(branches, output), state

    def known(
        self, store: Store | None, given: Prompt | tuple[()], text: Text
    ) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
        """All that is searched, the store first, and which of it was output."""
        tokens, output = suffixes.buffer(given, text)
        if store is None:
            return tokens, output
        earlier = jnp.pad(store.tokens, (0, 1), constant_values=NOTHING)
        earlier = jnp.broadcast_to(earlier, (tokens.shape[0], earlier.shape[0]))
        join = lambda a, b: jnp.concatenate([a, b], axis=1)  # noqa: E731
        return join(earlier, tokens), join(jnp.ones_like(earlier, bool), output)

    def counts(self, output: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        """Slots before a token that has any weight."""
        weighs = jnp.where(output, self.weight > 0, self.weight < 1)
        return jnp.pad(weighs, ((0, 0), (0, 1)))[:, 1:]

    def long_enough(
        self, branches: Int[Array, "B M L"], length: Int[Array, "B M"]
    ) -> Int[Array, "B"]:
        """The length of the suffix whose subtree is proposed.

        Branches stand with longer matches first, so a node whose first branch has a match of n tokens is
        below all suffixes of up to n.
        """
        alike = shared(branches)
        itself = jnp.arange(length.shape[1], dtype=jnp.int32)[None, :, None]
        new = alike.any(2) & (alike.argmax(2).astype(jnp.int32) == itself)
        below = jnp.arange(1, self.max_match + 1, dtype=jnp.int32)
        there = length[..., None] >= below[None, None]
        nodes = jnp.where(there, new.sum(-1, dtype=jnp.int32)[..., None], 0).sum(1)
        wide = nodes >= max(self.enough, 1)
        return jnp.where(wide, below[None], 1).max(-1)

    def weigh(self, output: Bool[Array, "B M"]) -> Float[Array, "B M"]:
        """What one place counts."""
        return jnp.where(output, self.weight, 1 - self.weight).astype(jnp.float32)

    def heaviest_nodes(
        self, branches: Int[Array, "B M L"], output: Bool[Array, "B M"]
    ) -> TokenTree:
        """The most frequent nodes of outputs, then the heaviest of all."""
        weights = self.weigh(output)
        kept = min(self.outputs, self.budget)
        if kept and 0 < self.weight < 1:
            own = jnp.where(output[..., None], branches, NOTHING)
            own = tree.merge(own, jnp.ones_like(weights), kept, by_prefix=True)
            paths, depth = tree.paths(own)
            level = jnp.arange(own.depth, dtype=jnp.int32)[None, None]
            inside = (level < depth[:, 1:, None]) & own.valid[..., None]
            paths = jnp.where(inside, paths[:, 1:], NOTHING)
            room = ((0, 0), (0, 0), (0, self.depth - own.depth))
            paths = jnp.pad(paths, room, constant_values=NOTHING)
            branches = jnp.concatenate([branches, paths], axis=1)
            weights = jnp.pad(weights, ((0, 0), (0, kept)), constant_values=FIRST)
        return tree.merge(branches, weights, self.budget, by_prefix=True)


def shared(branches: Int[Array, "B M L"]) -> Bool[Array, "B M M L"]:
    """Which branches (axis 2) begin like each one (axis 1), up to each of its tokens."""
    alike = (branches[:, :, None] == branches[:, None]) & (branches[:, :, None] >= 0)
    return jnp.cumprod(alike, axis=-1, dtype=jnp.int32) > 0


def frequencies(
    alike: Bool[Array, "B M M L"], weights: Float[Array, "B M"]
) -> Float[Array, "B M L"]:
    """What the node at each token weighs."""
    return jnp.where(alike, weights[:, None, :, None], 0).sum(2)


def heaviest_branch(branches: Int[Array, "B M L"], weights: Float[Array, "B M"]) -> TokenTree:
    """From the root the heaviest child, and so on; of equal ones the first."""
    alike = shared(branches)
    weight = frequencies(alike, weights)
    alive = jnp.ones(weights.shape, bool)
    for level in range(branches.shape[2]):
        here = jnp.where(alive, weight[:, :, level], 0)
        chosen = here.argmax(1)[:, None]
        with_it = jnp.take_along_axis(alike[..., level], chosen[..., None], axis=1)[:, 0]
        alive = jnp.where(here.max(1, keepdims=True) > 0, alive & with_it, alive)
    length = (branches >= 0).sum(-1, dtype=jnp.int32)
    chosen = jnp.where(alive, length, -1).argmax(1)[:, None, None]
    tokens = jnp.take_along_axis(branches, chosen, axis=1)[:, 0]
    return tree.chain(jnp.where(tokens >= 0, tokens, 0), tokens >= 0, None)


def whole_branches(
    branches: Int[Array, "B M L"], weights: Float[Array, "B M"], budget: int
) -> TokenTree:
    """Branches that are no part of another one, the heaviest first, until their lengths fill the budget."""
    alike = shared(branches)
    weight = frequencies(alike, weights)
    length = (branches >= 0).sum(-1, dtype=jnp.int32)
    end = jnp.maximum(length - 1, 0)[..., None]
    weight = jnp.take_along_axis(weight, end, axis=2)[..., 0]
    covers = jnp.take_along_axis(alike, end[..., None], axis=3)[..., 0]  # [B, M, M]: by axis 2
    order = jnp.arange(length.shape[1], dtype=jnp.int32)
    longer = length[:, None] > length[:, :, None]
    twin = (length[:, None] == length[:, :, None]) & (order[None] < order[:, None])[None]
    own = (length > 0) & ~(covers & (longer | twin)).any(2)
    rank = jnp.argsort(jnp.where(own, -weight, jnp.inf), axis=1, stable=True)
    pick = functools.partial(jnp.take_along_axis, indices=rank, axis=1)
    length = jnp.where(pick(own), pick(length), 0)
    left = budget - (length.cumsum(1, dtype=jnp.int32) - length)  # before each of them
    branches = jnp.take_along_axis(branches, rank[..., None], axis=1)
    level = jnp.arange(branches.shape[2], dtype=jnp.int32)[None, None]
    branches = jnp.where(level < jnp.minimum(length, left)[..., None], branches, NOTHING)
    return tree.merge(branches, jnp.zeros_like(weights), budget)
