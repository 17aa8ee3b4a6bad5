"""Rounds over texts that a target has said already, without the target.

A drafter that looks at nothing but text drafts the same whoever says it. So its rounds at temperature 0 can
be counted on recorded outputs, in the same loop, in a moment: what sweeps over many settings need.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.decode import loop, stats
from specjax.decode.interfaces import (
    Block,
    Drafter,
    Extended,
    Open,
    Params,
    Prefilled,
    Prompt,
    Text,
)
from specjax.decode.sampling import Sampling
from specjax.decode.verify import GreedyMatch
from specjax.models.cache import Cache


@dataclasses.dataclass(frozen=True)
class Replay:
    """A target that says what was recorded, at whatever it is asked behind.

    ``params`` are the recorded texts, int32 ``[B, L]``, in the loop's own layout: what stands behind a
    token at position n is ``params[b, n + 1]``. Of a node off the text that is wrong and without
    consequence: its parent was refused.

    Attributes:
      vocab_size, eos_id: of what was recorded.
      start_id: for an encoder-decoder, the decoder's start token; None where a text begins with the prompt.
    """

    vocab_size: int
    eos_id: int
    start_id: int | None = None

    reads = ()

    def prefill(self, params, prompt: Prompt, slots: int, *, taps=()) -> Prefilled:
        batch, first = prompt.tokens.shape[0], None
        tokens, length = prompt.tokens, prompt.length
        if self.start_id is not None:
            tokens, length = jnp.full((batch, 1), self.start_id, jnp.int32), jnp.ones_like(length)
            first = length
        text = Text(jnp.pad(tokens, [(0, 0), (0, slots)]), length, first)
        return Prefilled(Cache((), length - 1), text, {}, prompt)

    def extend(
        self, params, cache, block: Block, open: Open | None = None, at=0, *, taps=(), logits_from=0
    ) -> Extended:
        position = cache.length[:, None] + block.depth
        says = jnp.take_along_axis(params, position + 1, axis=1, mode="clip")[:, logits_from:]
        logits = jnp.where(says[..., None] == jnp.arange(self.vocab_size)[None, None], 0.0, -1e9)
        return Extended(logits, {}, Open((), position))

    def commit(self, cache: Cache, open, keep, count) -> Cache:
        return cache._replace(length=cache.length + count)

    def rewind(self, cache: Cache, length) -> Cache:
        return cache._replace(length=jnp.minimum(cache.length, length))


class Recorded(NamedTuple):
    """What a target said.

    Attributes:
      prompt: ``[B, L]``.
      tokens: int32 ``[B, T]``, behind the prompt (or the start token).
      lengths: int32 ``[B]``.
    """

    prompt: Prompt
    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]


def rounds(model: Replay, drafter: Drafter, draft, said: Recorded) -> dict:
    """The statistics of decoding these texts with a drafter; see `specjax.decode.stats.summary`.

    Raises:
      RuntimeError: the drafter changed the text, which no drafter can.
    """
    out = _decode(model, drafter, said.tokens.shape[1], draft, said.prompt, said.tokens)
    tokens, lengths, counted = jax.device_get(out)
    inside = np.arange(tokens.shape[1])[None] < said.lengths[:, None]
    if (lengths != said.lengths).any() or (tokens[inside] != said.tokens[inside]).any():
        raise RuntimeError("what was replayed is not what was recorded")
    return stats.summary(counted)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(
    model: Replay,
    drafter: Drafter,
    steps: int,
    draft,
    prompt: Prompt,
    tokens: Int[Array, "B T"],
):
    """Rows end by EOS, or after the T tokens that were recorded at most."""
    batch = tokens.shape[0]
    decoder = loop.Decoder(model, steps, drafter, GreedyMatch(), model.eos_id)
    texts = _laid_out(model, prompt, tokens)
    keys = jax.random.split(jax.random.key(0), batch)
    params = Params(texts, draft)
    state = loop.start(decoder, params, prompt, keys)
    state = loop.run(decoder, params, state, Sampling(0.0).rows(batch))
    out = loop.decoded(decoder, state)
    return out.tokens, out.lengths, out.stats


def _laid_out(model: Replay, prompt: Prompt, tokens: Int[Array, "B T"]) -> Int[Array, "B L"]:
    """Prompt (or start token) and record of every row, one behind the other."""
    before, length = prompt.tokens, prompt.length
    if model.start_id is not None:
        length = jnp.ones_like(length)
        before = jnp.full((len(length), 1), model.start_id, jnp.int32)
    room = jnp.pad(before, ((0, 0), (0, tokens.shape[1])))
    put = lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,))  # noqa: E731
    return jax.vmap(put)(room, tokens.astype(jnp.int32), length)
