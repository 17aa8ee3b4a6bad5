"""Continuous batching: rows that have ended get the next prompt while the others go on.

The loop runs until enough rows have ended, the host takes their outputs, and new prompts are read
in small groups into the freed rows. A prompt's randomness comes from its own number alone, so its
output depends neither on the rows it shared a batch with nor on where the work was interrupted.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from specjax.decode import devices, loop, stopping
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.loop import Decoded, Decoder, State
from specjax.decode.sampling import Sampling
from specjax.decode.stopping import Stops

# The number of a row without a prompt.
IDLE = -1


class Request(NamedTuple):
    """A prompt in a queue.

    Attributes:
      number: which prompt it is; its random numbers follow from this.
      tokens: int32 ids, at least one.
    """

    number: int
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Refill:
    """A batch of rows that is kept full.

    Attributes:
      decoder: how a row is decoded.
      batch_size: rows.
      input_length: prompts are padded to this; a longer one is an error.
      group: how many prompts are read at a time; 0 is a quarter of the batch. Smaller groups leave
        fewer rows idle, larger ones read prompts more cheaply.
    """

    decoder: Decoder
    batch_size: int
    input_length: int
    group: int = 0

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self.group <= self.batch_size:
            raise ValueError(f"group must lie in 0 .. {self.batch_size}, got {self.group}")
        if self.batch_size % devices.row_shards(self.decoder.mesh):
            raise ValueError(
                f"{self.batch_size} rows do not divide over the mesh's "
                f"{devices.row_shards(self.decoder.mesh)} groups of devices"
            )

    @property
    def rows_at_once(self) -> int:
        """Prompts read at a time: as many for every group of devices."""
        shards = devices.row_shards(self.decoder.mesh)
        return -(-(self.group or max(1, self.batch_size // 4)) // shards) * shards

    def __call__(
        self,
        params: Params,
        requests: Iterable[Request],
        sampling: Sampling,
        key: Key[Array, ""],
        stop: Stops | Sequence[Sequence[int]] = (),
    ) -> Iterator[tuple[int, Decoded]]:
        """Decodes a queue of prompts.

        Args:
          params: of target and drafter.
          requests: read as rows become free.
          sampling: one law for all prompts.
          key: a prompt's key is this one, folded with its number.
          stop: token sequences that end a text.

        Yields:
          (number, its output: one row, without the batch axis), in the order they end.

        Raises:
          ValueError: a prompt is empty or too long, or sampling values out of range.
        """
        sampling.check(self.decoder.eos_id)
        law, waiting = sampling.rows(self.batch_size), iter(requests)
        if self.decoder.mesh is not None:
            law = devices.put_rows(law, self.decoder.mesh)
        numbers, state = np.full(self.batch_size, IDLE), None
        begin = functools.partial(self._insert, params, key, stopping.stops(stop))
        while True:
            state, more = self._fill(begin, state, waiting, numbers)
            busy = int((numbers != IDLE).sum())
            if not busy:
                return
            wanted = min(self.rows_at_once, busy) if more else busy
            ended = np.int32(self.batch_size - busy + wanted)
            state = run_until(self.decoder, params, state, law, ended)
            yield from self._take(state, numbers)

    def _fill(self, begin, state, waiting, numbers) -> tuple[State | None, bool]:
        """Reads prompts while a whole group of rows is free; whether more prompts may wait."""
        while (free := np.flatnonzero(numbers == IDLE)).size >= self.rows_at_once:
            requests = list(itertools.islice(waiting, self.rows_at_once))
            if requests:
                rows = free[: len(requests)]
                numbers[rows] = [request.number for request in requests]
                state = begin(state, requests, rows)
            if len(requests) < self.rows_at_once:
                return state, False
        return state, True

    def _insert(self, params, key, stops, state, requests: list[Request], rows) -> State:
        prompt, ids = self._pad(requests)
        keys = loop.row_keys(key, jnp.asarray(ids))
        prompt, keys = devices.put_rows((prompt, keys), self.decoder.mesh)
        fresh = loop.jit_start(self.decoder, params, prompt, keys, stops)
        if state is None:
            state = spread(fresh, self.batch_size)
        # Rows past the batch are dropped: that is where the copies that fill up a group go.
        places = np.full(self.rows_at_once, self.batch_size, np.int32)
        places[: len(rows)] = rows
        return insert(state, fresh, places)

    def _pad(self, requests: list[Request]) -> tuple[Prompt, np.ndarray]:
        tokens = np.zeros((self.rows_at_once, self.input_length), np.int32)
        lengths = np.zeros(self.rows_at_once, np.int32)
        ids = np.zeros(self.rows_at_once, np.int32)
        for row, request in enumerate(itertools.islice(itertools.cycle(requests), len(ids))):
            size = len(request.tokens)
            if not 1 <= size <= self.input_length:
                raise ValueError(
                    f"prompt {request.number} has {size} ids, allowed are 1 to {self.input_length}"
                )
            tokens[row, :size], lengths[row], ids[row] = request.tokens, size, request.number
        return Prompt(tokens, lengths), ids

    def _take(self, state: State, numbers: np.ndarray) -> Iterator[tuple[int, Decoded]]:
        """Outputs of the rows that have ended; those rows become idle."""
        out = devices.fetch(loop.jit_decoded(self.decoder, state))
        for row in np.flatnonzero((out.finish_reason != stopping.LIVE) & (numbers != IDLE)):
            number, numbers[row] = int(numbers[row]), IDLE
            yield number, jax.tree.map(lambda x, row=row: x[row], out)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def run_until(
    decoder: Decoder, params: Params, state: State, sampling: Sampling, ended: Int[Array, ""]
) -> State:
    """Rounds until ``ended`` rows of the batch have ended."""
    whole, rows, split = loop.WHOLE, loop.ROWS, loop.STATE
    batch = state.finish.shape[0]

    def go(params, state, sampling, ended):
        body = functools.partial(loop.one_round, decoder, params, sampling=sampling)
        over = lambda s: batch - loop.live_rows(decoder, s) < ended  # noqa: E731
        return lax.while_loop(over, lambda s: body(s), state)

    return loop.apart(decoder, go, (whole, split, rows, whole), split)(
        params, state, sampling, ended
    )


@functools.partial(jax.jit, static_argnums=1)
def spread(group: State, batch_size: int) -> State:
    """A batch of ended rows: copies of the group's, so that nothing in them is out of range."""
    rows = jnp.arange(batch_size, dtype=jnp.int32) % group.finish.shape[0]
    state = jax.tree.map(lambda x: x[rows], group._replace(stops=None))
    ended = jnp.full(batch_size, stopping.LENGTH, jnp.int32)
    return state._replace(finish=ended, stops=group.stops)


@functools.partial(jax.jit, donate_argnums=0)
def insert(state: State, fresh: State, rows: Int[Array, "R"]) -> State:
    """Puts the rows of ``fresh`` into ``state``; a row number past the batch is dropped."""
    old, new = (s._replace(stops=None) for s in (state, fresh))  # the one part that has no rows
    joined = jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), old, new)
    return joined._replace(stops=state.stops)
