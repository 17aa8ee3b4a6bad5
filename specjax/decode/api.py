"""What users call: `generate` returns whole outputs, `stream` yields tokens round by round."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key, PyTree

from specjax.decode import devices, loop, several, stopping
from specjax.decode.interfaces import Drafter, Model, Params, Prompt, Verifier
from specjax.decode.loop import Decoded, Decoder, State
from specjax.decode.sampling import Sampling
from specjax.decode.stopping import Stops
from specjax.decode.verify import SpeculativeSampling


class Piece(NamedTuple):
    """What a round added.

    Attributes:
      tokens: int32 ``[B, K]``, pad (0) from ``count`` on.
      count: int32 ``[B]``; 0 where the row had ended before.
      finish_reason: int32 ``[B]``, a code of `specjax.decode.stopping`; `LIVE` goes on.
    """

    tokens: Int[Array, "B K"]
    count: Int[Array, "B"]
    finish_reason: Int[Array, "B"]


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
    eos_id: int | Sequence[int] | None = None,
    stop: Stops | Sequence[Sequence[int]] = (),
    num_decodes: int | None = None,
    rescale_log_probs: bool = True,
    mesh: Mesh | None = None,
) -> Decoded:
    """Decodes a batch of prompts, speculatively if a drafter is given.

    The output is the target's own: equal tokens when greedy, the same law when sampling, if the
    verifier is lossless.

    Args:
      model: the target.
      params: its parameters.
      prompt: tokens and lengths; a forced decoder prefix, if there is one.
      drafter: how to draft; None decodes plainly.
      draft_params: the drafter's parameters.
      verifier: acceptance rule; speculative sampling by default.
      sampling: logit processors, temperature, top-k, top-p; greedy by default.
      max_decode_len: tokens to emit at most, EOS included; a forced prefix does not count.
      key: random key (key 0 by default).
      row_ids: int32 ``[B]``; a row's randomness depends on ``fold(key, row_id)`` and nothing else
        (0 .. B - 1 by default).
      eos_id: one id or several that end a text, instead of the model's own (all of them, where it has
        several); -1 for none.
      stop: token sequences that end a text, themselves included; ids or padded arrays (traced).
      num_decodes: independent decodes per prompt, as a second axis of the output; None is one
        decode without that axis. The prompt is read once.
      rescale_log_probs: False reports log-probabilities before temperature and filters.
      mesh: devices to decode on (`specjax.partitioning.mesh`); rows are split over its axes but
        ``model``, which must divide their number.

    Returns:
      `Decoded`.

    Raises:
      ValueError: sampling values out of range, a negative length, lengths of prompt or prefix that do
        not fit it, a text longer than the model's positions reach, a stop sequence without ids, or a
        verifier that does not fit.
    """
    decoder, both, state, rows = _prepare(
        model,
        params,
        prompt,
        drafter=drafter,
        draft_params=draft_params,
        verifier=verifier,
        sampling=sampling,
        max_decode_len=max_decode_len,
        key=key,
        row_ids=row_ids,
        eos_id=eos_id,
        stop=stop,
        num_decodes=num_decodes,
        rescale_log_probs=rescale_log_probs,
        mesh=mesh,
    )
    return loop.jit_decoded(decoder, loop.jit_run(decoder, both, state, rows))


def stream(model: Model, params: PyTree, prompt: Prompt, **options) -> Iterator[Piece]:
    """Decodes as `generate` does, and yields what each round has committed.

    One compiled round under a loop on the host, which waits for each: the tokens are those of
    `generate`, the speed is not.

    Args:
      model, params, prompt: as for `generate`.
      **options: as for `generate`, but for ``num_decodes``.

    Returns:
      An iterator over `Piece` with NumPy arrays; what the generator returns is the `Decoded`.

    Raises:
      ValueError: as `generate`, at the call and not with the first piece; or ``num_decodes``.
    """
    if options.get("num_decodes") is not None:
        raise ValueError("stream yields one decode per prompt; num_decodes belongs to generate")
    return _pieces(*_prepare(model, params, prompt, **options))


def _pieces(decoder: Decoder, params: Params, state: State, rows: Sampling) -> Iterator[Piece]:
    finish = devices.fetch(state.finish)
    while (finish == stopping.LIVE).any():
        state, piece = jit_round(decoder, params, state, rows)
        piece = devices.fetch(piece)
        finish = piece.finish_reason
        yield piece
    return loop.jit_decoded(decoder, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def jit_round(decoder: Decoder, params: Params, state: State, sampling: Sampling):
    """One round, compiled, and the `Piece` it added. The state is donated."""
    given, out = (loop.WHOLE, loop.STATE, loop.ROWS), (loop.STATE, loop.ROWS)
    go = loop.apart(decoder, functools.partial(_round, decoder), given, out)
    return go(params, state, sampling)


def _round(
    decoder: Decoder, params: Params, state: State, sampling: Sampling
) -> tuple[State, Piece]:
    length = state.text.length
    state = loop.one_round(decoder, params, state, sampling=sampling)
    index = jnp.arange(decoder.block, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(state.text.tokens, length[:, None] + index, axis=1)
    count = state.text.length - length
    return state, Piece(jnp.where(index < count[:, None], tokens, 0), count, state.finish)


def _prepare(
    model: Model,
    params: PyTree,
    prompt: Prompt,
    *,
    max_decode_len: int,
    drafter: Drafter | None = None,
    draft_params: PyTree = None,
    verifier: Verifier | None = None,
    sampling: Sampling = Sampling(),
    key: Key[Array, ""] | None = None,
    row_ids: Int[Array, "B"] | None = None,
    eos_id: int | Sequence[int] | None = None,
    stop: Stops | Sequence[Sequence[int]] = (),
    num_decodes: int | None = None,
    rescale_log_probs: bool = True,
    mesh: Mesh | None = None,
) -> tuple[Decoder, Params, State, Sampling]:
    """Checks what was asked for, then reads the prompt."""
    eos_id = stopping.end_ids(model) if eos_id is None else eos_id
    eos_id = int(eos_id) if np.ndim(eos_id) == 0 else stopping.listed(eos_id)
    verifier = SpeculativeSampling() if verifier is None else verifier
    sampling.check(eos_id)
    _check(prompt, max_decode_len, num_decodes)
    _check_positions(model, prompt, max_decode_len)
    rows, shards = prompt.tokens.shape[0], devices.row_shards(mesh)
    if rows % shards:
        raise ValueError(f"{rows} rows do not divide over the mesh's {shards} groups of devices")
    check = getattr(verifier, "check", None)
    if drafter is not None and check is not None:
        check(sampling)
    batch = prompt.tokens.shape[0]
    decoder = Decoder(
        model, max_decode_len, drafter, verifier, eos_id, num_decodes, rescale_log_probs, mesh
    )
    ids = jnp.arange(batch, dtype=jnp.int32) if row_ids is None else jnp.asarray(row_ids, jnp.int32)
    keys = loop.row_keys(jax.random.key(0) if key is None else key, ids)
    both, rows = Params(params, draft_params), sampling.rows(batch)
    state = loop.jit_start(decoder, both, prompt, keys, stopping.stops(stop))
    return decoder, both, state, rows if num_decodes is None else several.repeat(rows, num_decodes)


def _check(prompt: Prompt, max_decode_len: int, num_decodes: int | None) -> None:
    """Raises ValueError on numbers out of range."""
    if max_decode_len < 0:
        raise ValueError(f"max_decode_len must not be negative, got {max_decode_len}")
    if num_decodes is not None and num_decodes < 1:
        raise ValueError(f"num_decodes must be at least 1, got {num_decodes}")
    _check_lengths("prompt", prompt, 1)
    if prompt.prefix is None:
        return
    batch = prompt.prefix.tokens.shape[0]
    if batch != prompt.tokens.shape[0]:
        raise ValueError(f"a prefix of {batch} rows for {prompt.tokens.shape[0]} prompts")
    _check_lengths("prefix", prompt.prefix, 0)


def _check_positions(model: Model, prompt: Prompt, max_decode_len: int) -> None:
    """Raises ValueError where the text may get longer than the model's positions reach."""
    most, (_, width) = getattr(model, "max_positions", None), prompt.tokens.shape
    known = _known(prompt.length)
    longest = (width if known is None else int(known.max(initial=0))) + max_decode_len
    if most is not None and longest > most:
        raise ValueError(
            f"prompt and max_decode_len together are {longest} tokens, the model has positions for {most}"
        )


def _known(length: Int[Array, "B"]) -> np.ndarray | None:
    """Lengths on the host; None under jit, and of an array on several hosts, of which a part is."""
    if isinstance(length, jax.core.Tracer) or not getattr(length, "is_fully_addressable", True):
        return None
    return np.asarray(length)  # NumPy's own comparisons: under jit JAX's would be traced


def _check_lengths(what: str, prompt: Prompt, least: int) -> None:
    (batch, width), length = prompt.tokens.shape, prompt.length
    if length.shape != (batch,):
        raise ValueError(f"{what} tokens of {batch} rows, but lengths of shape {length.shape}")
    known = _known(length)
    if known is not None and np.any((known < least) | (known > width)):
        raise ValueError(f"{what} lengths must lie in {least} .. {width}, got {known}")
