"""A forced decoder prefix: what an encoder-decoder's text begins with, read ahead of all rounds."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from specjax.decode.interfaces import Block, Model, Prompt, Text


def force(
    model: Model, params: PyTree, cache: Any, prompt: Prompt, slots: int, start_id: int
) -> tuple[Any, Text]:
    """The text so far, start token and prefix, and a cache of all of it but its newest token.

    Args:
      model: whose cache it is.
      params: its parameters.
      cache: empty, cross-attention in place.
      prompt: what ``prompt.prefix`` stands in, if there is one.
      slots: size of the text's buffer.
      start_id: what every text begins with.

    Returns:
      (cache, text). One block is read and committed, so ragged prefixes cost one step together.
    """
    batch = prompt.length.shape[0]
    tokens, one = jnp.full((batch, slots), start_id, jnp.int32), jnp.ones(batch, jnp.int32)
    if prompt.prefix is None or prompt.prefix.tokens.shape[1] == 0:
        return cache, Text(tokens, one, first=one)
    words, length, _ = prompt.prefix
    width = words.shape[1]
    tokens = tokens.at[:, 1 : width + 1].set(words)
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    mask = jnp.broadcast_to(jnp.asarray(np.tri(width, dtype=bool)), (batch, width, width))
    read = model.extend(params, cache, Block(tokens[:, :width], index, mask))
    cache = model.commit(cache, read.open, index, length)
    return cache, Text(tokens, length + 1, first=one)
