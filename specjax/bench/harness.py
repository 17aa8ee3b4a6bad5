"""Measures decoding methods against plain decoding, on text that nothing was trained or tuned on.

gamma is chosen on one half of the held-out sample and reported on the other. Runs of one prompt
follow each other directly (plain, then each method, in rotating order), so that drift of the machine
hits all of them alike; figures are medians over repeats.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from rich import progress as rich_progress

from specjax.bench import timing
from specjax.bench.free_draft import FreeDraft
from specjax.data import samples
from specjax.data.sources import Example, Source
from specjax.data.vocabulary import Vocabulary
from specjax.decode import loop, stats, stopping
from specjax.decode.interfaces import Block, Drafter, Model, Params, Prompt, Verifier
from specjax.decode.loop import Decoder
from specjax.decode.sampling import Sampling
from specjax.decode.verify import SpeculativeSampling

# Two tokens are a near-tie when the plain program's logits differ by no more than this, relative to
# the largest logit (or 1).
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of decoding.

    Attributes:
      name: as the report calls it.
      gamma: the deepest path that is drafted in a round, 0 for plain decoding.
      drafter: None for plain decoding.
      verifier: acceptance rule.
      draft: which of the drafts it decodes with; by default the one of its own name.
      setting: what tells it from others of its name; by default its gamma.
    """

    name: str
    gamma: int = 0
    drafter: Drafter | None = None
    verifier: Verifier = SpeculativeSampling()
    draft: str | None = None
    setting: str | None = None

    @property
    def label(self) -> str:
        """Its setting, as tables and pictures have it."""
        return str(self.gamma) if self.setting is None else self.setting

    @property
    def nodes(self) -> int:
        """Drafted tokens that the target reads in a round."""
        return 0 if self.drafter is None else self.drafter.nodes

    def pick(self, params: Params) -> Params:
        """What it decodes with: ``params.draft`` holds every draft by name."""
        return Params(params.target, (params.draft or {}).get(self.draft or self.name))

    def decoder(self, runner: "Runner", eos_id: int | tuple[int, ...]) -> Decoder:
        return Decoder(runner.model, runner.max_decode_len, self.drafter, self.verifier, eos_id)


def told_apart(drafters: Sequence[Drafter]) -> list[tuple[str, Drafter]]:
    """Drafters of one method with a label for each: the fields in which they differ."""
    told = [dataclasses.asdict(drafter) for drafter in drafters]
    if not told:
        raise ValueError("a method is given no setting to try")
    names = dict.fromkeys(k for fields in told for k in fields)
    differing = [k for k in names if len({repr(fields.get(k)) for fields in told}) > 1]
    label = lambda fields: " ".join(f"{k} {fields[k]}" for k in differing if k in fields)  # noqa: E731
    labels = [label(fields) if differing else "–" for fields in told]
    if len(set(labels)) < len(labels):
        raise ValueError(f"a method is given the same setting twice: {', '.join(labels)}")
    return list(zip(labels, drafters, strict=True))


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
      examples: what they were made from, in order.
    """

    task: str
    prompts: list[Prompt]
    real: list[int]
    examples: list[Example]


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
        decoder = method.decoder(self, stopping.end_ids(self.model))
        batch = prompt.tokens.shape[0]
        both = method.pick(params)
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
        return stats.summary(stats.joined(run.stats for repeat in self.runs for run in repeat))


def halves(source: Source, vocabulary: Vocabulary, length: int) -> dict[str, list[Example]]:
    """A source's examples whose inputs fit ``length`` ids, in two halves that share none.

    The shipped sample and prompt sets have halves of their own, by what their texts are from; of another
    source every second example is for calibration.
    """
    fitting = lambda found: [e for e in found if len(e.inputs) <= length]  # noqa: E731
    if hasattr(source, "half"):
        parts = {h: dataclasses.replace(source, half=h) for h in samples.HALVES}
        return {half: fitting(part.read(vocabulary)) for half, part in parts.items()}
    found = fitting(source.read(vocabulary))
    return {half: found[i::2] for i, half in enumerate(samples.HALVES)}


def make_workload(
    task: str, half: str, examples: list[Example], count: int, length: int, batch_size: int
) -> Workload:
    """The first ``count`` examples, in batches padded to ``length`` ids.

    Raises:
      ValueError: there are fewer of them.
    """
    if len(examples) < count:
        raise ValueError(
            f"{task} {half}: {count} examples asked for, {len(examples)} fit {length} tokens"
        )
    prompts, real = [], []
    for i in range(0, count, batch_size):
        rows = [e.inputs for e in examples[i : min(i + batch_size, count)]]
        real.append(len(rows))
        rows += rows[:1] * (batch_size - len(rows))
        tokens = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
        lengths = np.asarray([len(row) for row in rows], np.int32)
        prompts.append(Prompt(jnp.asarray(tokens), jnp.asarray(lengths)))
    return Workload(task, prompts, real, examples[:count])


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
def rounds(decoder: Decoder, params: Params, state: loop.State, sampling: Sampling, count):
    """The loop's own body ``count`` times, whether rows have ended or not."""
    body = functools.partial(loop.one_round, decoder, params, sampling=sampling)
    return jax.lax.fori_loop(0, count, lambda _, state: body(state), state)


def round_seconds(
    runner: Runner,
    methods: list[Method],
    params: Params,
    prompt: Prompt,
    repeats: int = 7,
) -> dict[Method, timing.Samples]:
    """Seconds of one round of each method, many in one compiled loop; the methods take turns."""
    batch = prompt.length.shape[0]
    count = max(2, 16 // batch)  # a round of many rows takes long enough by itself
    keys = loop.row_keys(jax.random.key(0), jnp.arange(batch, dtype=jnp.int32))
    sampling, calls = Sampling(0.0).rows(batch), {}
    for method in methods:
        decoder = method.decoder(runner, eos_id=-1)
        own = method.pick(params)
        state = loop.jit_start(decoder, own, prompt, keys)
        calls[method] = functools.partial(rounds, decoder, own, state, sampling, jnp.int32(count))
    return {m: taken / count for m, taken in timing.interleaved(calls, repeats).items()}


def free(runner: Runner, method: Method, params: Params, prompt: Prompt) -> Method:
    """The same shape of trees with drafts that cost nothing."""
    decoder, own = method.decoder(runner, eos_id=-1), method.pick(params)
    keys = loop.row_keys(jax.random.key(0), jnp.arange(prompt.length.shape[0], dtype=jnp.int32))

    def propose(own, prompt, keys):
        state = loop.start(decoder, own, prompt, keys)
        sampling = Sampling(0.0).rows(prompt.length.shape[0])
        return method.drafter.propose(own, state.drafter, state.text, sampling, keys)[0]

    proposed = jax.eval_shape(propose, own, prompt, keys)
    drafter = FreeDraft.like(proposed, runner.model.vocab_size)
    return Method("free", method.gamma, drafter, method.verifier)


class Costs(NamedTuple):
    """Cost of a round and of its parts, timed in turns on the calibration half.

    Attributes:
      plain_seconds: a step of the plain loop.
      verify_seconds: a round whose drafting is free: verify block, judgement, commit, statistics.
      round_seconds: a whole round.
    """

    plain_seconds: float
    verify_seconds: float
    round_seconds: float

    @classmethod
    def measure(
        cls, runner: Runner, methods: list[Method], params: Params, prompt: Prompt
    ) -> dict[Method, "Costs"]:
        """Costs of every method that drafts; the first method is plain decoding."""
        plain, *drafted = methods
        empty = {m: free(runner, m, params, prompt) for m in drafted}
        alone = list(dict.fromkeys(empty.values()))  # several may have trees of one shape
        taken = round_seconds(runner, [*methods, *alone], params, prompt)
        seconds = {method: samples.median for method, samples in taken.items()}
        return {m: cls(seconds[plain], seconds[empty[m]], seconds[m]) for m in drafted}

    @property
    def draft_seconds(self) -> float:
        """What one round's drafting adds.

        Not what it takes alone: a target larger than the caches evicts the draft's weights from
        them in every round.
        """
        return max(self.round_seconds - self.verify_seconds, 0.0)

    def c(self, gamma: int) -> float:
        """Cost of one drafted token over a plain step."""
        return self.draft_seconds / gamma / self.plain_seconds

    @property
    def v(self) -> float:
        """Cost of a verify round over a plain step."""
        return self.verify_seconds / self.plain_seconds


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
