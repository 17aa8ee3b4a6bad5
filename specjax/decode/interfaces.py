"""The protocols of the draft/verify loop and the pytrees that pass between them.

Value objects (models, drafters, verifiers) are frozen dataclasses: hashable, static under ``jit``,
without arrays. Arrays live in the pytrees below.

Axis letters, used throughout the package: B rows, N tree nodes, M block tokens (root and nodes),
W open slots, P the deepest path, K = P + 1 tokens a round can emit at most, V vocabulary,
S cache slots, L tokens of a text buffer or prompt, H heads, D head size, Q rows of ``log_q``.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, PyTree


class Prompt(NamedTuple):
    """What the user asks with.

    Attributes:
      tokens: int32 ``[B, L]``; beyond ``length`` padding that is never read.
      length: int32 ``[B]``.
      prefix: tokens and lengths (0 and more) of a forced decoder prefix, without the start token.
        The decoder reads it as if it had said it; none of it counts as emitted, and an EOS in it
        ends nothing, as in T5X.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, "B"]
    prefix: "Prompt | None" = None


class Text(NamedTuple):
    """The committed tokens: the only history there is.

    For an encoder-decoder it begins with the start token, for a decoder-only model with the prompt.
    The newest token is in no cache yet.

    Attributes:
      tokens: int32 ``[B, L]``; slots from ``length`` on are garbage.
      length: int32 ``[B]``, at least 1.
      first: int32 ``[B]``: the first slot that logit processors and drafters may read (1 behind a
        start token); a model's prefill sets it, and None is 0.
      start: int32 ``[B]``: the first slot that was emitted; the loop sets it.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, "B"]
    first: Int[Array, "B"] | None = None
    start: Int[Array, "B"] | None = None


class Block(NamedTuple):
    """What a model reads in one step.

    Attributes:
      tokens: int32 ``[B, M]``.
      depth: int32 ``[B, M]``; the token's position is ``cache.length[b] + depth``.
      mask: bool ``[B, M, W]``: which open slots a token sees (itself included).
    """

    tokens: Int[Array, "B M"]
    depth: Int[Array, "B M"]
    mask: Bool[Array, "B M W"]


class Open(NamedTuple):
    """Keys and values of tokens that are not committed yet.

    Attributes:
      kv: per layer (key, value), each ``[B, H, W, D]``.
      position: int32 ``[B, W]``.
    """

    kv: tuple
    position: Int[Array, "B W"]


class Prefilled(NamedTuple):
    """A model's state after it has read the prompt.

    Attributes:
      cache: holds all of ``text`` but its newest token.
      text: the committed tokens, in a buffer of the asked number of slots.
      taps: hidden states a drafter asked for, by name.
      prompt: the prompt itself; a drafter with its own encoder reads it.
    """

    cache: Any
    text: Text
    taps: dict
    prompt: Prompt


class Extended(NamedTuple):
    """One step's result.

    Attributes:
      logits: ``[B, M - logits_from, V]``, at least float32.
      taps: the hidden states asked for, by name, ``[B, M, d]`` each.
      open: the open slots with this block written at ``at``.
    """

    logits: Float[Array, "B M V"]
    taps: dict
    open: Open


class Params(NamedTuple):
    """Parameters of a decode: EAGLE and Medusa use the target's embedding and output layer."""

    target: PyTree
    draft: PyTree


@struct.dataclass
class TokenTree:
    """Drafted tokens as a tree below the root (the newest committed token).

    ``parent[i] < i``; siblings stand in the order they were drawn. Padding is ``valid`` = False,
    never a token id.

    Attributes:
      tokens: int32 ``[B, N]``.
      parent: int32 ``[B, N]``; -1 is the root.
      valid: bool ``[B, N]``: fed to the target.
      judged: bool ``[B, N]``: a candidate for acceptance.
      log_q: ``[B, Q, V]`` log-probabilities that nodes were drawn from, or None.
      q_row: int32 ``[B, N]``: the node's row of ``log_q``; -1 if it was chosen deterministically.
      depth: the deepest path, P (static).
      replace: whether siblings were drawn with replacement (static).
      chain: whether every node is the child of the one before (static), which is cheaper to read and
        to judge.
    """

    tokens: Int[Array, "B N"]
    parent: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    judged: Bool[Array, "B N"]
    log_q: Float[Array, "B Q V"] | None
    q_row: Int[Array, "B N"]
    depth: int = struct.field(pytree_node=False)
    replace: bool = struct.field(pytree_node=False, default=True)
    chain: bool = struct.field(pytree_node=False, default=False)


class Verdict(NamedTuple):
    """A verifier's decision.

    Attributes:
      path: int32 ``[B, P]``: accepted nodes from the root down; -1 behind the last.
      accepted: int32 ``[B]``: how many.
      next_token: int32 ``[B]``: drawn from ``log_next``.
      log_next: ``[B, V]``: the law of the token after the path (residual or bonus).
      log_accept: ``[B, N]``: log-probability that the node is accepted, once it is tested.
      tested: bool ``[B, N]``: nodes on which a trial was made.
    """

    path: Int[Array, "B P"]
    accepted: Int[Array, "B"]
    next_token: Int[Array, "B"]
    log_next: Float[Array, "B V"]
    log_accept: Float[Array, "B N"]
    tested: Bool[Array, "B N"]


class Outcome(NamedTuple):
    """A round after the cut by EOS and length, as drafters and statistics see it.

    Attributes:
      tree: what was proposed.
      verdict: what the verifier said of it.
      extended: the target's step over root and nodes.
      tokens: int32 ``[B, K]``: path, then next token; garbage from ``count`` on.
      count: int32 ``[B]``: tokens that were appended (0: nothing happened to this row).
      keep: int32 ``[B, K]``: open slots to commit (root, then path); ``keep[:count]`` counts.
      text: the text after the round.
      log_p: ``[B, N + 1, V]``: the target's sampling law after the root and after each node.
    """

    tree: TokenTree
    verdict: Verdict
    extended: Extended
    tokens: Int[Array, "B K"]
    count: Int[Array, "B"]
    keep: Int[Array, "B K"]
    text: Text
    log_p: Float[Array, "B M V"]


@runtime_checkable
class Model(Protocol):
    """A target or draft model. ``extend`` never writes the cache; ``commit`` is its only writer.

    Attributes:
      eos_id: the end of a text.
      reads: taps of the target's prefill that this model's prefill takes as keywords, if it is a
        draft that shares some part of the target; () for a model on its own.

    A model may also have

    - ``other_eos_ids``: further ids that end a text; without it there are none.
    - ``max_positions``: the tokens of its longest text. A target refuses longer ones, a draft drafts
      nothing behind it. Without it, or where it is None, texts have no end.
    """

    eos_id: int
    reads: tuple[str, ...]

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Fresh parameters."""
        ...

    def abstract(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and types of the parameters."""
        ...

    def logical_axes(self) -> PyTree[tuple[str, ...]]:
        """Logical axis names of the parameters (T5X's names)."""
        ...

    def prefill(self, params: PyTree, prompt: Prompt, slots: int, *, taps=()) -> Prefilled:
        """Reads the prompt; caches and text have room for ``slots`` tokens."""
        ...

    def open(self, batch: int, width: int) -> Open:
        """Empty open slots."""
        ...

    def extend(
        self, params, cache, block: Block, open: Open | None = None, at=0, *, taps=(), logits_from=0
    ):
        """Reads a block: one softmax over the cache and the open slots. Returns ``Extended``.

        ``logits_from`` (static) spares the logits of the block's first tokens.
        """
        ...

    def commit(self, cache, open: Open, keep: Int[Array, "B K"], count: Int[Array, "B"]):
        """Writes open slots ``keep[:count]`` behind the cache; count 0 freezes a row."""
        ...

    def rewind(self, cache, length: Int[Array, "B"]):
        """Lowers lengths; never raises them."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A way of drafting.

    Attributes:
      depth: the deepest path it proposes.
      nodes: the number of nodes of its trees.
      taps: the target's hidden states it wants, from its prefill or its steps as they have them.
      reach: how many slots past the text its own cache may touch.

    One whose trees have no branches says so with ``chain = True``: rules for chains judge it too.
    """

    depth: int
    nodes: int
    taps: tuple[str, ...]
    reach: int

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> PyTree:
        """State after the prompt; rows are the first axis of all its arrays."""
        ...

    def propose(self, params: Params, state, text: Text, sampling, keys: Key[Array, "B"]):
        """Returns (tree, state); writes no cache."""
        ...

    def observe(self, params: Params, state, outcome: Outcome) -> PyTree:
        """Takes a finished round in; where its count is 0 nothing happened."""
        ...

    def rewind(self, state, length: Int[Array, "B"]) -> PyTree:
        """Forgets what lies behind ``length`` tokens of text."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """An acceptance rule."""

    lossless: bool

    def walk(self, tree: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]):
        """The rule itself as a pure function of the uniforms; ``next_token`` is not drawn yet."""
        ...

    def judge(self, tree: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        """Uniforms, walk and one draw of the next token. Returns a ``Verdict``."""
        ...
