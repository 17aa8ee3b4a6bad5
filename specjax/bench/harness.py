"""Measures decoding methods against plain decoding, on text that nothing was trained or tuned on.

gamma is chosen on one half of the held-out sample and reported on the other. Runs of one prompt
follow each other directly (plain, then each method, in rotating order), so that drift of the machine
hits all of them alike; figures are medians over repeats.
"""

import dataclasses
import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from rich import progress as rich_progress

from specjax.bench.free_draft import FreeDraft
from specjax.data import samples
from specjax.data.vocabulary import Vocabulary
from specjax.decode import loop, stats, stopping
from specjax.decode.interfaces import Block, Drafter, Model, Params, Prompt
from specjax.decode.loop import Decoder
from specjax.decode.sampling import Sampling

# Two tokens are a near-tie when the plain program's logits differ by no more than this, relative to
# the largest logit (or 1).
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of decoding.

    Attributes:
      name: as the report calls it.
      gamma: drafted tokens per round, 0 for plain decoding.
      drafter: None for plain decoding.
    """

    name: str
    gamma: int = 0
    drafter: Drafter | None = None


class Run(NamedTuple):
    """One timed decode of one batch.

    Attributes:
      tokens, lengths: as `Decoded` has them, on the host.
      finish: finish codes.
      prefill_seconds, decode_seconds: encoder and first caches; everything after.
      stats: counts of the rows that are prompts (padding rows left out).
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    prefill_seconds: float
    decode_seconds: float
    stats: stats.Stats

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def emitted(self) -> int:
        return int(self.lengths.sum())


class Workload(NamedTuple):
    """Prompts of one task in batches of one size.

    Attributes:
      task: its name.
      prompts: token batches; a last batch is filled up with copies of its first row.
      real: how many rows of each batch are prompts.
      references: expected outputs, in order.
    """

    task: str
    prompts: list[Prompt]
    real: list[int]
    references: list[str]


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs methods on batches.

    Attributes:
      model: the target.
      max_decode_len: tokens at most.
      seed: of the sampling keys.
    """

    model: Model
    max_decode_len: int
    seed: int = 0

    def __call__(
        self,
        method: Method,
        params: Params,
        prompt: Prompt,
        real: int,
        temperature: float,
        first: int = 0,
        repeat: int = 0,
    ) -> Run:
        """Decodes one batch, blocking after prefill and at the end.

        ``first`` numbers the batch's first prompt, ``repeat`` the repeat: every prompt of every
        repeat has random numbers of its own, whatever the batch size.
        """
        decoder = Decoder(self.model, self.max_decode_len, method.drafter, eos_id=self.model.eos_id)
        batch = prompt.tokens.shape[0]
        both = params if method.drafter is not None else Params(params.target, None)
        ids = first + jnp.arange(batch, dtype=jnp.int32)
        key = jax.random.fold_in(jax.random.key(self.seed), repeat)
        keys = loop.row_keys(key, ids)
        sampling = Sampling(temperature).rows(batch)
        jax.block_until_ready((keys, sampling))
        began = time.perf_counter()
        state = jax.block_until_ready(loop.jit_start(decoder, both, prompt, keys))
        between = time.perf_counter()
        state = jax.block_until_ready(loop.jit_run(decoder, both, state, sampling))
        ended = time.perf_counter()
        out = jax.device_get(loop.jit_decoded(decoder, state))
        rows = jax.tree.map(lambda x: x[:real], out)
        return Run(
            rows.tokens,
            rows.lengths,
            rows.finish_reason,
            between - began,
            ended - between,
            rows.stats,
        )


class Measured(NamedTuple):
    """All runs of one method on one workload: ``runs[repeat][batch]``."""

    runs: list[list[Run]]

    def seconds(self, part: str = "seconds") -> np.ndarray:
        """Summed over batches, per repeat ``[R]``."""
        return np.array([sum(getattr(run, part) for run in repeat) for repeat in self.runs])

    def tokens(self) -> np.ndarray:
        """Emitted per repeat ``[R]``."""
        return np.array([sum(run.emitted for run in repeat) for repeat in self.runs])

    def per_token(self, part: str = "seconds") -> np.ndarray:
        return self.seconds(part) / np.maximum(self.tokens(), 1)

    def summary(self) -> dict:
        """Counts of all repeats together, and the ratios made of them."""
        runs = [run.stats for repeat in self.runs for run in repeat]
        return stats.summary(
            stats.Stats(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))
        )


def load_workload(
    task: str, half: str, vocabulary: Vocabulary, count: int, length: int, batch_size: int
) -> Workload:
    """The first ``count`` held-out examples of a half whose inputs fit ``length`` tokens.

    Raises:
      ValueError: the half has fewer of them.
    """
    fitting = [
        e for e in samples.load_heldout(task, half) if len(vocabulary.encode(e.inputs)) < length
    ]
    if len(fitting) < count:
        raise ValueError(
            f"{task} {half}: {count} examples asked for, {len(fitting)} fit {length} tokens"
        )
    chosen = fitting[:count]
    prompts, real = [], []
    for i in range(0, count, batch_size):
        texts = [example.inputs for example in chosen[i : i + batch_size]]
        real.append(len(texts))
        texts += texts[:1] * (batch_size - len(texts))
        prompts.append(Prompt(*map(jnp.asarray, vocabulary.batch(texts, length))))
    return Workload(task, prompts, real, [example.targets for example in chosen])


def measure(
    runner: Runner,
    methods: list[Method],
    params: Params,
    workload: Workload,
    temperature: float,
    repeats: int,
    tick=lambda: None,
) -> dict[Method, Measured]:
    """Interleaved runs of all methods: the order rotates from batch to batch and repeat to repeat."""
    runs = {method: [[] for _ in range(repeats)] for method in methods}
    for repeat in range(repeats):
        first = 0
        for i, (prompt, real) in enumerate(zip(workload.prompts, workload.real, strict=True)):
            shift = (i + repeat) % len(methods)
            for method in methods[shift:] + methods[:shift]:
                run = runner(method, params, prompt, real, temperature, first, repeat)
                runs[method][repeat].append(run)
            first += real
            tick()
    return {method: Measured(r) for method, r in runs.items()}


def warm_up(runner: Runner, methods: list[Method], params: Params, workload: Workload) -> dict:
    """Compiles every method's programs; seconds per method (first call less a second one)."""
    seconds = {}
    for method in methods:
        times = []
        for _ in range(2):
            began = time.perf_counter()
            runner(method, params, workload.prompts[0], workload.real[0], 0.0)
            times.append(time.perf_counter() - began)
        seconds[method] = max(times[0] - times[1], 0.0)
    return seconds


@functools.partial(jax.jit, static_argnums=0)
def _draft_rounds(drafter: Drafter, params: Params, state, text, sampling, keys, rounds):
    """Proposes ``rounds`` times, each depending on all of the proposal before it."""

    def one(_, carry):
        text, total = carry
        tree, _ = drafter.propose(params, state, text, sampling, keys)
        newest = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None] == text.length[:, None] - 1
        tokens = jnp.where(newest, tree.tokens[:, -1:], text.tokens)
        return text._replace(tokens=tokens), total + tree.log_q.max()

    return jax.lax.fori_loop(0, rounds, one, (text, jnp.zeros((), jnp.float32)))


def draft_seconds(
    runner: Runner,
    method: Method,
    params: Params,
    prompt: Prompt,
    rounds: int = 16,
    repeats: int = 7,
) -> float:
    """Median seconds of one `propose`, in a compiled loop of its own."""
    decoder = Decoder(runner.model, runner.max_decode_len, method.drafter)
    batch = prompt.length.shape[0]
    keys = loop.row_keys(jax.random.key(0), jnp.arange(batch, dtype=jnp.int32))
    state = loop.jit_start(decoder, params, prompt, keys)
    sampling, count = Sampling(1.0).rows(batch), jnp.int32(rounds)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        out = _draft_rounds(
            method.drafter, params, state.drafter, state.text, sampling, keys, count
        )
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / rounds)
    return float(np.median(times[1:]))


def verify_seconds(
    runner: Runner, method: Method, params: Params, prompt: Prompt, repeats: int = 3
) -> float:
    """Median seconds of a round whose drafting costs nothing."""
    free = Method("free", method.gamma, FreeDraft(method.gamma, runner.model.vocab_size))
    real = prompt.length.shape[0]
    runs = [runner(free, params, prompt, real, 0.0) for _ in range(repeats + 1)]
    return float(
        np.median([run.decode_seconds / max(int(run.stats.rounds.max()), 1) for run in runs[1:]])
    )


class Costs(NamedTuple):
    """Cost of a round and of its parts, each measured by itself, on the calibration half.

    Attributes:
      plain_seconds: a step of the plain loop.
      draft_seconds: one round's drafting.
      verify_seconds: a round without drafting: verify block, judgement, commit, statistics.
      round_seconds: a whole round; about the sum of the two.
    """

    plain_seconds: float
    draft_seconds: float
    verify_seconds: float
    round_seconds: float

    def c(self, gamma: int) -> float:
        """Cost of one drafted token over a plain step."""
        return self.draft_seconds / gamma / self.plain_seconds

    @property
    def v(self) -> float:
        """Cost of a verify round over a plain step."""
        return self.verify_seconds / self.plain_seconds


def seconds_per_round(measured: Measured) -> float:
    """Median over repeats of decode seconds per target step of a batch."""
    rounds = [sum(int(run.stats.rounds.max()) for run in repeat) for repeat in measured.runs]
    return float(np.median(measured.seconds("decode_seconds") / np.maximum(rounds, 1)))


class Difference(NamedTuple):
    """Where a greedy output leaves the plain one.

    Attributes:
      row: prompt number.
      position: index of the first differing token.
      plain, other: the two ids.
      gap: difference of their logits under the plain program.
      near_tie: whether the gap is within rounding (see `NEAR_TIE`).
    """

    row: int
    position: int
    plain: int
    other: int
    gap: float
    near_tie: bool


@functools.partial(jax.jit, static_argnums=0)
def _plain_logits(model: Model, params: PyTree, prompt: Prompt, tokens: jax.Array) -> jax.Array:
    """Logits of plain steps along given tokens ``[B, T]``: ``[B, T, V]``."""
    batch, length = tokens.shape
    prefilled = model.prefill(params, prompt, length + 2)
    keep, one = jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)

    def step(carry, token):
        cache, root = carry
        mask = jnp.ones((batch, 1, 1), bool)
        read = model.extend(params, cache, Block(root[:, None], keep, mask))
        return (model.commit(cache, read.open, keep, one), token), read.logits[:, 0]

    _, logits = jax.lax.scan(step, (prefilled.cache, loop.newest(prefilled.text)), tokens.T)
    return logits.transpose(1, 0, 2)


def differences(
    runner: Runner, params: Params, workload: Workload, plain: list[Run], other: list[Run]
) -> list[Difference]:
    """Rows whose greedy tokens differ, each judged by the plain program on the common prefix."""
    found, row = [], 0
    for prompt, a, b in zip(workload.prompts, plain, other, strict=True):
        for i in range(len(a.lengths)):
            at = np.flatnonzero(a.tokens[i] != b.tokens[i])
            if len(at):
                one = Prompt(prompt.tokens[i : i + 1], prompt.length[i : i + 1])
                logits = _plain_logits(
                    runner.model, params.target, one, jnp.asarray(a.tokens[i : i + 1])
                )
                logits = np.asarray(logits)[0, at[0]]
                ids = int(a.tokens[i, at[0]]), int(b.tokens[i, at[0]])
                gap = float(abs(logits[ids[0]] - logits[ids[1]]))
                near = gap <= NEAR_TIE * max(1.0, float(np.abs(logits).max()))
                found.append(Difference(row + i, int(at[0]), *ids, gap, near))
        row += len(a.lengths)
    return found


def texts(vocabulary: Vocabulary, runs: list[Run]) -> list[str]:
    """Decoded outputs in order."""
    return [
        vocabulary.decode(row[:length].tolist())
        for run in runs
        for row, length in zip(run.tokens, run.lengths, strict=True)
    ]


def check_finished(measured: Measured) -> None:
    """Raises RuntimeError if a row's law was no distribution."""
    for run in measured.runs[0]:
        if (run.finish == stopping.ERROR).any():
            raise RuntimeError("a row met logits that are NaN or all masked")


def progress() -> rich_progress.Progress:
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    )
