"""The draft/verify loop and the plain loop: prefill -> while(draft -> verify -> commit) -> Decoded.

`specjax.decode.api` wraps it for users.

This file knows only the protocols of `specjax.decode.interfaces`, never a concrete model or drafter.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key

from specjax.decode import devices, processors, several, stopping, tree
from specjax.decode import sampling as laws
from specjax.decode import stats as counters
from specjax.decode.interfaces import (
    Block,
    Drafter,
    Model,
    Outcome,
    Params,
    Prompt,
    Text,
    TokenTree,
    Verdict,
    Verifier,
)
from specjax.decode.sampling import Sampling
from specjax.decode.stats import Stats
from specjax.decode.verify import NEXT, SpeculativeSampling


class Decoded(NamedTuple):
    """What a decode returns.

    With ``num_decodes`` n every array has a second axis of size n: decodes of one prompt in rising
    order of their scores, the best last, as T5X has them.

    Attributes:
      tokens: int32 ``[B, max_decode_len]``, pad (0) from ``lengths`` on; no start token.
      lengths: int32 ``[B]``, EOS included.
      finish_reason: int32 ``[B]``, a code of `specjax.decode.stopping`.
      log_probs: ``[B, max_decode_len]`` of the tokens under the sampling law (so 0 where greedy),
        or with ``rescale_log_probs`` False under the softmax of the processed logits, whatever
        temperature and filters are; 0 behind the end. Both are T5X's.
      stats: counts per row.
      scores: ``[B]``: the sum of ``log_probs``; EOS counts, a forced prefix does not.
    """

    tokens: Int[Array, "*B T"]
    lengths: Int[Array, "*B"]
    finish_reason: Int[Array, "*B"]
    log_probs: Float[Array, "*B T"]
    stats: Stats
    scores: Float[Array, "*B"]


class State(NamedTuple):
    """What the loop carries.

    Attributes:
      text: committed tokens; ``text.start`` of them were given.
      cache: the target's.
      drafter: the drafter's state; () in the plain loop.
      finish: int32 ``[B]`` finish codes.
      log_probs: ``[B, L]`` beside ``text.tokens``.
      keys: one per row.
      stats: counts; ``stats.rounds`` numbers a row's rounds.
      stops: stop sequences, the same for all rows; None for none.

    All arrays but those of ``stops`` have rows as first axis, those of cache and drafter too.
    """

    text: Text
    cache: Any
    drafter: Any
    finish: Int[Array, "B"]
    log_probs: Float[Array, "B L"]
    keys: Key[Array, "B"]
    stats: Stats
    stops: stopping.Stops | None = None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static half of a decode: one compiled program per value (and per shapes).

    Attributes:
      model: the target.
      max_decode_len: tokens to emit at most, EOS included.
      drafter: None for plain decoding.
      verifier: acceptance rule.
      eos_id: -1 for none; a tuple where several ids end a text (`stopping.end_ids`).
      num_decodes: decodes per prompt; None is one, without an axis for it.
      rescale_log_probs: whether log-probabilities are those of the sampling law.
      mesh: devices to decode on; None leaves it to where the arguments lie. Rows are split over all
        its axes but ``model`` (see `apart`).
    """

    model: Model
    max_decode_len: int
    drafter: Drafter | None = None
    verifier: Verifier = SpeculativeSampling()
    eos_id: int | tuple[int, ...] = 1
    num_decodes: int | None = None
    rescale_log_probs: bool = True
    mesh: Mesh | None = None

    @property
    def block(self) -> int:
        """K: tokens a round can emit at most."""
        return 1 if self.drafter is None else self.drafter.depth + 1


def start(
    decoder: Decoder,
    params: Params,
    prompt: Prompt,
    keys: Key[Array, "B"],
    stops: stopping.Stops | None = None,
) -> State:
    """Reads the prompt with target and drafter, once per prompt whatever ``num_decodes``."""
    forced = 0 if prompt.prefix is None else prompt.prefix.tokens.shape[1]
    slots = forced + decoder.max_decode_len + 1 + decoder.block
    drafter, batch = decoder.drafter, prompt.tokens.shape[0]
    taps = () if drafter is None else drafter.taps
    prefilled = decoder.model.prefill(params.target, prompt, slots, taps=taps)
    state = () if drafter is None else drafter.init(params, prefilled, slots + drafter.reach)
    limit = stopping.LENGTH if decoder.max_decode_len == 0 else stopping.LIVE
    first = State(
        text=given(prefilled.text),
        cache=prefilled.cache,
        drafter=state,
        finish=jnp.full(batch, limit, jnp.int32),
        log_probs=jnp.zeros(prefilled.text.tokens.shape, jnp.float32),
        keys=keys,
        stats=counters.empty(batch, 0 if drafter is None else drafter.depth),
    )
    state = first if decoder.num_decodes is None else several.expand(first, decoder.num_decodes)
    return state._replace(stops=stops)


def given(text: Text) -> Text:
    """A text of which nothing is emitted yet."""
    first = jnp.zeros_like(text.length) if text.first is None else text.first
    return text._replace(first=first, start=text.length)


def run(decoder: Decoder, params: Params, state: State, sampling: Sampling) -> State:
    """Rounds until every row has ended: one `while_loop`, no host round trip."""
    body = functools.partial(one_round, decoder, params, sampling=sampling)
    return lax.while_loop(lambda s: live_rows(decoder, s) > 0, lambda s: body(s), state)


def live_rows(decoder: Decoder, state: State) -> Int[Array, ""]:
    """How many rows have not ended, on all devices together.

    Groups of devices keep step, though rows have nothing to say to each other: the compiler may
    write one exchange of data for all groups, which a group that has left the loop would miss.
    """
    count = (state.finish == stopping.LIVE).sum(dtype=jnp.int32)
    axes = devices.row_axes(decoder.mesh)
    return lax.psum(count, axes) if axes else count


def one_round(decoder: Decoder, params: Params, state: State, *, sampling: Sampling) -> State:
    """The decoder's kind of round."""
    kind = plain_round if decoder.drafter is None else speculative_round
    return kind(decoder, params, state, sampling=sampling)


def speculative_round(
    decoder: Decoder, params: Params, state: State, *, sampling: Sampling
) -> State:
    """Propose -> extend root and nodes -> law -> judge -> cut -> commit -> observe -> tally."""
    model, drafter, text = decoder.model, decoder.drafter, state.text
    keys = laws.fold(state.keys, state.stats.rounds)
    left = remaining(decoder, state)

    with jax.named_scope("draft"):
        proposed, drafting = drafter.propose(params, state.drafter, text, sampling, keys)
        proposed = tree.limit(proposed, left)
    with jax.named_scope("verify"):
        block = tree.block(proposed, newest(text))
        extended = model.extend(params.target, state.cache, block, taps=drafter.taps)
        log_p, reported = laws_of(decoder, extended.logits, sampling, text, proposed)
        verdict = decoder.verifier.judge(proposed, log_p, keys)
    with jax.named_scope("commit"):
        tokens = path_tokens(proposed.tokens, verdict)
        keep = jnp.concatenate([jnp.zeros_like(verdict.path[:, :1]), verdict.path + 1], axis=1)
        sound = sound_tokens(log_p, keep, verdict.accepted)
        broken = sound <= verdict.accepted
        ends = (state.finish, decoder.eos_id, broken, state.stops, text)
        cut = stopping.cut(tokens, sound, left, *ends)
        state = append(state, tokens, token_log_probs(reported, keep, tokens), cut)
        outcome = Outcome(proposed, verdict, extended, tokens, cut.count, keep, state.text, log_p)
        return state._replace(
            cache=model.commit(state.cache, extended.open, keep, cut.count),
            drafter=drafter.observe(params, drafting, outcome),
            stats=counters.tally(state.stats, outcome, block.depth[:, 1:]),
        )


def plain_round(decoder: Decoder, params: Params, state: State, *, sampling: Sampling) -> State:
    """One token by the target alone: the baseline every speed-up is measured against."""
    root, batch = newest(state.text), state.finish.shape[0]
    keys = laws.fold(laws.fold(state.keys, state.stats.rounds), NEXT)
    block = Block(root[:, None], jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch, 1, 1), bool))
    extended = decoder.model.extend(params.target, state.cache, block)
    log_p, reported = laws_of(decoder, extended.logits, sampling, state.text)
    tokens = laws.draw(log_p[:, 0], laws.uniform(keys, 1, log_p.dtype)[:, 0])[:, None]
    keep, one = jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)
    broken, left = laws.broken(log_p[:, 0]), remaining(decoder, state)
    sound = jnp.where(broken, 0, one)
    ends = (state.finish, decoder.eos_id, broken, state.stops, state.text)
    cut = stopping.cut(tokens, sound, left, *ends)
    state = append(state, tokens, token_log_probs(reported, keep, tokens), cut)
    return state._replace(
        cache=decoder.model.commit(state.cache, extended.open, keep, cut.count),
        stats=counters.tally_plain(state.stats, cut.count),
    )


def laws_of(
    decoder: Decoder,
    logits: Float[Array, "B M V"],
    sampling: Sampling,
    text: Text,
    nodes: TokenTree | None = None,
) -> tuple[Float[Array, "B M V"], Float[Array, "B M V"]]:
    """(sampling law, law to report) after the text, or after root and nodes of a tree."""
    history = processors.history(processors.recall(sampling.processors, text), nodes)
    log_p = laws.log_law(logits, sampling, history)
    if decoder.rescale_log_probs:
        return log_p, log_p
    return log_p, jax.nn.log_softmax(laws.processed(logits, sampling, history), axis=-1)


def remaining(decoder: Decoder, state: State) -> Int[Array, "B"]:
    """Tokens each row may still emit."""
    return decoder.max_decode_len - (state.text.length - state.text.start)


def newest(text: Text) -> Int[Array, "B"]:
    """The newest committed token: the root of the next tree."""
    return jnp.take_along_axis(text.tokens, text.length[:, None] - 1, axis=1)[:, 0]


def path_tokens(nodes: Int[Array, "B N"], verdict: Verdict) -> Int[Array, "B K"]:
    """Accepted tokens, then the next token (behind it garbage)."""
    path = jnp.take_along_axis(nodes, jnp.clip(verdict.path, 0), axis=1)
    tokens = jnp.concatenate([path, jnp.zeros_like(path[:, :1])], axis=1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index == verdict.accepted[:, None], verdict.next_token[:, None], tokens)


def token_log_probs(
    log_p: Float[Array, "B M V"], keep: Int[Array, "B K"], tokens: Int[Array, "B K"]
) -> Float[Array, "B K"]:
    """Log-probability of each emitted token at the block row it follows."""
    picked = jnp.take_along_axis(log_p, tokens[:, None], axis=2)  # [B, M, K]
    rows = jnp.clip(keep, 0)[:, None]
    return jnp.take_along_axis(picked, rows, axis=1)[:, 0]


def sound_tokens(
    log_p: Float[Array, "B M V"], keep: Int[Array, "B K"], accepted: Int[Array, "B"]
) -> Int[Array, "B"]:
    """How many of the path's tokens and the next one stand before a law that is none.

    Such a law is NaN, or has everything masked; plain decoding would stop there, and nowhere else.
    """
    broken = jnp.take_along_axis(laws.broken(log_p), jnp.clip(keep, 0), axis=1)
    index = jnp.arange(keep.shape[1], dtype=jnp.int32)[None]
    end = accepted[:, None] + 1
    return jnp.where(broken & (index < end), index, end).min(1)


def append(
    state: State, tokens: Int[Array, "B K"], log_probs: Float[Array, "B K"], cut: stopping.Cut
) -> State:
    """Appends ``tokens[:count]`` to each row's text."""
    text = state.text
    write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
    return state._replace(
        text=text._replace(
            tokens=write(text.tokens, tokens, text.length), length=text.length + cut.count
        ),
        log_probs=write(state.log_probs, log_probs.astype(jnp.float32), text.length),
        finish=cut.finish,
    )


def decoded(decoder: Decoder, state: State) -> Decoded:
    """Cuts start token, prefix and padding off."""
    steps = jnp.arange(decoder.max_decode_len, dtype=jnp.int32)[None]
    lengths = state.text.length - state.text.start
    inside = steps < lengths[:, None]
    pick = lambda x: jnp.take_along_axis(x, steps + state.text.start[:, None], axis=1)  # noqa: E731
    log_probs = jnp.where(inside, pick(state.log_probs), 0.0)
    out = Decoded(
        tokens=jnp.where(inside, pick(state.text.tokens), 0),
        lengths=lengths,
        finish_reason=state.finish,
        log_probs=log_probs,
        stats=state.stats,
        scores=log_probs.sum(1),
    )
    return out if decoder.num_decodes is None else several.best_last(out, decoder.num_decodes)


# How arguments are split over rows: the whole of it, or a share of rows to every group of devices.
WHOLE, ROWS = False, True
STATE = State(*[ROWS] * (len(State._fields) - 1), stops=WHOLE)


def apart(decoder: Decoder, function: Callable, given: tuple, out: Any) -> Callable:
    """Each group of devices works on its own share of the rows.

    So each writes its own caches in place, as one device does. Inside of a group the model is split
    over the mesh's axis ``model``, as its parameters' shardings have it, by the compiler.

    Args:
      decoder: its mesh; without one the function is returned as it is.
      function: works on any number of rows.
      given: `WHOLE` or `ROWS` per argument (a tree of them where an argument mixes both).
      out: the same for the result.
    """
    mesh = decoder.mesh
    if mesh is None:
        return function
    axes = devices.row_axes(mesh)
    place = lambda tree: jax.tree.map(lambda rows: P(axes) if rows else P(), tree)  # noqa: E731
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=place(given),
        out_specs=place(out),
        axis_names=set(axes),
        check_vma=False,
    )


@functools.partial(jax.jit, static_argnums=0)
def jit_start(
    decoder: Decoder,
    params: Params,
    prompt: Prompt,
    keys: Key[Array, "B"],
    stops: stopping.Stops | None = None,
) -> State:
    """`start`, compiled."""
    begin = apart(decoder, functools.partial(start, decoder), (WHOLE, ROWS, ROWS, WHOLE), STATE)
    return begin(params, prompt, keys, stops)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def jit_run(decoder: Decoder, params: Params, state: State, sampling: Sampling) -> State:
    """`run`, compiled. The state is donated, so that its caches are updated where they lie."""
    go = apart(decoder, functools.partial(run, decoder), (WHOLE, STATE, ROWS), STATE)
    return go(params, state, sampling)


@functools.partial(jax.jit, static_argnums=0)
def jit_decoded(decoder: Decoder, state: State) -> Decoded:
    """`decoded`, compiled."""
    return apart(decoder, functools.partial(decoded, decoder), (STATE,), ROWS)(state)


def row_keys(key: Key[Array, ""], ids: Int[Array, "B"]) -> Key[Array, "B"]:
    """One key per row, from the call's key and the row's number alone."""
    return laws.fold(jnp.broadcast_to(key, ids.shape), ids)
