"""The draft/verify loop and the plain loop: prefill -> while(draft -> verify -> commit) -> Decoded.

This file knows only the protocols of `specjax.decode.interfaces`, never a concrete model or drafter.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax.decode import processors, stopping, tree
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
    Verdict,
    Verifier,
)
from specjax.decode.sampling import Sampling
from specjax.decode.stats import Stats
from specjax.decode.verify import NEXT, SpeculativeSampling


class Decoded(NamedTuple):
    """What a decode returns.

    Attributes:
      tokens: int32 ``[B, max_decode_len]``, pad (0) from ``lengths`` on; no start token.
      lengths: int32 ``[B]``, EOS included.
      finish_reason: int32 ``[B]``, a code of `specjax.decode.stopping`.
      log_probs: ``[B, max_decode_len]`` of the tokens under the sampling law; 0 behind the end.
      stats: counts per row.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    finish_reason: Int[Array, "B"]
    log_probs: Float[Array, "B T"]
    stats: Stats


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
    """

    text: Text
    cache: Any
    drafter: Any
    finish: Int[Array, "B"]
    log_probs: Float[Array, "B L"]
    keys: Key[Array, "B"]
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static half of a decode: one compiled program per value (and per shapes).

    Attributes:
      model: the target.
      max_decode_len: tokens to emit at most, EOS included.
      drafter: None for plain decoding.
      verifier: acceptance rule.
      eos_id: -1 for none.
    """

    model: Model
    max_decode_len: int
    drafter: Drafter | None = None
    verifier: Verifier = SpeculativeSampling()
    eos_id: int = 1

    @property
    def block(self) -> int:
        """K: tokens a round can emit at most."""
        return 1 if self.drafter is None else self.drafter.depth + 1


def start(decoder: Decoder, params: Params, prompt: Prompt, keys: Key[Array, "B"]) -> State:
    """Reads the prompt with target and drafter."""
    slots = decoder.max_decode_len + 1 + decoder.block
    drafter, batch = decoder.drafter, prompt.tokens.shape[0]
    taps = () if drafter is None else drafter.taps
    prefilled = decoder.model.prefill(params.target, prompt, slots, taps=taps)
    state = () if drafter is None else drafter.init(params, prefilled, slots + drafter.reach)
    limit = stopping.LENGTH if decoder.max_decode_len == 0 else stopping.LIVE
    return State(
        text=given(prefilled.text),
        cache=prefilled.cache,
        drafter=state,
        finish=jnp.full(batch, limit, jnp.int32),
        log_probs=jnp.zeros(prefilled.text.tokens.shape, jnp.float32),
        keys=keys,
        stats=counters.empty(batch, 0 if drafter is None else drafter.depth),
    )


def given(text: Text) -> Text:
    """A text of which nothing is emitted yet."""
    first = jnp.zeros_like(text.length) if text.first is None else text.first
    return text._replace(first=first, start=text.length)


def run(decoder: Decoder, params: Params, state: State, sampling: Sampling) -> State:
    """Rounds until every row has ended: one `while_loop`, no host round trip."""
    one = plain_round if decoder.drafter is None else speculative_round
    body = functools.partial(one, decoder, params, sampling=sampling)
    return lax.while_loop(lambda s: (s.finish == stopping.LIVE).any(), lambda s: body(s), state)


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
        history = processors.history(processors.recall(sampling.processors, text), proposed)
        log_p = laws.log_law(extended.logits, sampling, history)
        verdict = decoder.verifier.judge(proposed, log_p, keys)
    with jax.named_scope("commit"):
        tokens = path_tokens(proposed.tokens, verdict)
        keep = jnp.concatenate([jnp.zeros_like(verdict.path[:, :1]), verdict.path + 1], axis=1)
        sound = sound_tokens(log_p, keep, verdict.accepted)
        broken = sound <= verdict.accepted
        cut = stopping.cut(tokens, sound, left, state.finish, decoder.eos_id, broken)
        state = append(state, tokens, token_log_probs(log_p, keep, tokens), cut)
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
    history = processors.history(processors.recall(sampling.processors, state.text))
    log_p = laws.log_law(extended.logits, sampling, history)
    tokens = laws.draw(log_p[:, 0], laws.uniform(keys, 1, log_p.dtype)[:, 0])[:, None]
    keep, one = jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)
    broken, left = laws.broken(log_p[:, 0]), remaining(decoder, state)
    sound = jnp.where(broken, 0, one)
    cut = stopping.cut(tokens, sound, left, state.finish, decoder.eos_id, broken)
    state = append(state, tokens, token_log_probs(log_p, keep, tokens), cut)
    return state._replace(
        cache=decoder.model.commit(state.cache, extended.open, keep, cut.count),
        stats=counters.tally_plain(state.stats, cut.count),
    )


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
    """Cuts prompt and padding off."""
    steps = jnp.arange(decoder.max_decode_len, dtype=jnp.int32)[None]
    lengths = state.text.length - state.text.start
    inside = steps < lengths[:, None]
    pick = lambda x: jnp.take_along_axis(x, steps + state.text.start[:, None], axis=1)  # noqa: E731
    return Decoded(
        tokens=jnp.where(inside, pick(state.text.tokens), 0),
        lengths=lengths,
        finish_reason=state.finish,
        log_probs=jnp.where(inside, pick(state.log_probs), 0.0),
        stats=state.stats,
    )


@functools.partial(jax.jit, static_argnums=0)
def jit_start(decoder: Decoder, params: Params, prompt: Prompt, keys: Key[Array, "B"]) -> State:
    """`start`, compiled."""
    return start(decoder, params, prompt, keys)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def jit_run(decoder: Decoder, params: Params, state: State, sampling: Sampling) -> State:
    """`run`, compiled. The state is donated, so that its caches are updated where they lie."""
    return run(decoder, params, state, sampling)


@functools.partial(jax.jit, static_argnums=0)
def jit_decoded(decoder: Decoder, state: State) -> Decoded:
    """`decoded`, compiled."""
    return decoded(decoder, state)


def generate(
    model: Model,
    params: PyTree,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    draft_params: PyTree = None,
    verifier: Verifier | None = None,
    sampling: Sampling = Sampling(),
    max_decode_len: int,
    key: Key[Array, ""] | None = None,
    row_ids: Int[Array, "B"] | None = None,
    eos_id: int | None = None,
) -> Decoded:
    """Decodes a batch of prompts, speculatively if a drafter is given.

    The output is the target's own: equal tokens when greedy, the same law when sampling, if the
    verifier is lossless.

    Args:
      model: the target.
      params: its parameters.
      prompt: tokens and lengths.
      drafter: how to draft; None decodes plainly.
      draft_params: the drafter's parameters.
      verifier: acceptance rule; speculative sampling by default.
      sampling: logit processors, temperature, top-k, top-p; greedy by default.
      max_decode_len: tokens to emit at most, EOS included.
      key: random key (key 0 by default).
      row_ids: int32 ``[B]``; a row's randomness depends on ``fold(key, row_id)`` and nothing else
        (0 .. B - 1 by default).
      eos_id: overrides the model's; -1 for none.

    Returns:
      `Decoded`.

    Raises:
      ValueError: sampling values out of range, a negative length, or a verifier that does not fit.
    """
    eos_id = model.eos_id if eos_id is None else eos_id
    sampling.check(eos_id)
    if max_decode_len < 0:
        raise ValueError(f"max_decode_len must not be negative, got {max_decode_len}")
    verifier = SpeculativeSampling() if verifier is None else verifier
    check = getattr(verifier, "check", None)
    if drafter is not None and check is not None:
        check(sampling)
    batch = prompt.tokens.shape[0]
    decoder = Decoder(model, max_decode_len, drafter, verifier, eos_id)
    ids = jnp.arange(batch, dtype=jnp.int32) if row_ids is None else jnp.asarray(row_ids, jnp.int32)
    key = jax.random.key(0) if key is None else key
    keys = laws.fold(jnp.broadcast_to(key, (batch,)), ids)
    both = Params(params, draft_params)
    state = jit_start(decoder, both, prompt, keys)
    state = jit_run(decoder, both, state, sampling.rows(batch))
    return jit_decoded(decoder, state)
