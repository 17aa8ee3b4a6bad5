"""Text that is shown while it is decoded: one prompt after the other, round by round."""

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.data.sources import Example
from specjax.data.vocabulary import Base
from specjax.decode import api, devices
from specjax.decode.interfaces import Prompt
from specjax.decode.loop import Decoded
from specjax.infer.system import System

# How much of a prompt is shown before its text.
HEAD = 72


def check(mesh: Mesh | None) -> None:
    """Raises ValueError where rows are not decoded one by one in one process."""
    if jax.process_count() > 1:
        raise ValueError(
            f"stream shows one prompt after the other in one process, this run has {jax.process_count()}"
        )
    shards = devices.row_shards(mesh)
    if shards > 1:
        raise ValueError(
            f"stream decodes one prompt at a time, the mesh has {shards} groups of devices for rows; set "
            f"NUM_PARTITIONS to the number of devices, or let the process see one"
        )


def decode(
    loaded: System,
    examples: Sequence[Example],
    input_length: int,
    mesh: Mesh | None = None,
    out: TextIO | None = None,
    **options,
) -> Iterator[tuple[int, Decoded]]:
    """Decodes prompts in their order, and writes each one's text as it grows.

    Args:
      loaded: what decodes.
      examples: the prompts.
      input_length: prompts are padded to this, so that one program serves all.
      mesh: devices to decode on.
      out: where the text goes; standard output by default.
      **options: of `specjax.stream`. A prompt's random numbers go with its number, as in
        `specjax.decode.refill`.

    Yields:
      (example's number, its output: one row, without the batch axis).
    """
    out = sys.stdout if out is None else out
    options |= dict(drafter=loaded.drafter, draft_params=loaded.params.draft, mesh=mesh)
    for example in examples:
        tokens = np.zeros((1, input_length), np.int32)
        tokens[0, : len(example.inputs)] = example.inputs
        prompt = Prompt(jnp.asarray(tokens), jnp.asarray([len(example.inputs)], jnp.int32))
        ids = jnp.asarray([example.number], jnp.int32)
        pieces = api.stream(loaded.target, loaded.params.target, prompt, row_ids=ids, **options)
        out.write(f"{_head(example)}\n")
        last = _show(pieces, loaded.vocabulary, out)
        yield example.number, jax.tree.map(lambda x: x[0], devices.fetch(last))


def _show(pieces: Iterator[api.Piece], vocabulary: Base, out: TextIO) -> Decoded:
    """Writes one row's text piece by piece; returns what the iterator returns."""
    text = vocabulary.stream()
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            out.write(text.end() + "\n\n")
            out.flush()
            return end.value
        out.write(text.push(piece.tokens[0, : piece.count[0]]))
        out.flush()


def _head(example: Example) -> str:
    """The prompt's number and the beginning of its first line."""
    first = next(iter(str(example.text["inputs_pretokenized"]).splitlines()), "")
    shown = first if len(first) <= HEAD else first[: HEAD - 1] + "…"
    return f"[{example.number}] {shown}".rstrip()
