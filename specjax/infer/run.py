"""``--run_mode=infer`` and ``--run_mode=eval``: decode a task or file; score it."""

import collections
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from rich import progress

from specjax import config, runs
from specjax.checkpoints import structure
from specjax.data import sources
from specjax.data.sources import Example, Source
from specjax.decode import devices, stats, stopping
from specjax.decode.interfaces import Drafter, Verifier
from specjax.decode.loop import Decoded, Decoder
from specjax.decode.refill import Refill, Request
from specjax.decode.sampling import Sampling
from specjax.decode.verify import SpeculativeSampling
from specjax.infer import streaming, system
from specjax.infer.outputs import Outputs
from specjax.infer.system import Checkpoint, System
from specjax.partitioning import hosts
from specjax.partitioning.rules import Partitioner

REASONS = ("live", "stop", "length", "error")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a source is decoded.

    Attributes:
      task_feature_lengths: ids at most, EOS included: of an ``inputs``, and of an output under
        ``targets``.
      truncate: cut longer inputs; otherwise they are an error.
      batch_size: rows decoded together.
      group: prompts read at a time when rows become free; 0 for a quarter of the batch.
      part_size: examples per part on disk, which is what an interruption can cost beside the rows in
        work.
      shard, num_shards: decode every ``num_shards``-th example, from ``shard`` on.
      seed: of sampling.
      include_tokens: write the ids as ``prediction_tokens``.
      include_aux: write score, counts and finish reason as ``aux``.
    """

    task_feature_lengths: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"inputs": 512, "targets": 128}
    )
    truncate: bool = False
    batch_size: int = 32
    group: int = 0
    part_size: int = 16
    shard: int = 0
    num_shards: int = 1
    seed: int = 0
    include_tokens: bool = False
    include_aux: bool = True

    def __post_init__(self):
        if set(self.task_feature_lengths) != {"inputs", "targets"}:
            given = dict(self.task_feature_lengths)
            raise ValueError(f"task_feature_lengths must hold 'inputs' and 'targets', got {given}")
        for name in ("input_length", "batch_size", "part_size", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_decode_len < 0:
            raise ValueError(f"max_decode_len must not be negative, got {self.max_decode_len}")
        if self.group < 0:
            raise ValueError(f"group must not be negative, got {self.group}")
        if not 0 <= self.shard < self.num_shards:
            raise ValueError(f"shard must lie in 0 .. {self.num_shards - 1}, got {self.shard}")

    @property
    def input_length(self) -> int:
        return self.task_feature_lengths["inputs"]

    @property
    def max_decode_len(self) -> int:
        return self.task_feature_lengths["targets"]


def infer(
    source: Source,
    target: Checkpoint,
    output_dir: str,
    drafter: Callable[..., Drafter] | None = None,
    draft: system.Draft | None = None,
    verifier: Verifier = SpeculativeSampling(),
    sampling: Sampling = Sampling(),
    stop: Sequence[Sequence[int]] = (),
    settings: Settings = Settings(),
    partitioner: Partitioner | None = None,
    stream: bool = False,
) -> epath.Path:
    """Decodes a source into ``<task>-predict.jsonl-SSSSS-of-NNNNN``, in input order.

    A run that was stopped continues where it was when it is started again.

    Args:
      source: what to decode.
      target: the model whose text is written.
      output_dir: where; local or ``gs://``.
      drafter: how to draft; None decodes plainly.
      draft: the drafter's weights.
      verifier: acceptance rule.
      sampling: logit processors, temperature, top-k, top-p.
      stop: sequences of ids that end a text, besides EOS.
      settings: sizes.
      partitioner: the devices to decode on, of all processes; None decodes on one.
      stream: decode one prompt at a time, whatever the batch size, and print each text as it grows;
        the file is the same. For reading along, not for speed: the host waits for every round.

    Returns:
      The finished file.

    Raises:
      ValueError: an input is too long, a checkpoint does not fit, ``output_dir`` holds another run, or
        ``stream`` is asked for in several processes or on a mesh that splits rows.
    """
    mesh = None if partitioner is None else partitioner.mesh
    if stream:
        streaming.check(mesh)
    getattr(verifier, "check", lambda _: None)(sampling)
    sampling.check()
    loaded = system.load(target, drafter, draft, partitioner)
    sampling.check(stopping.end_ids(loaded.target))
    how = {"verifier": verifier, "sampling": sampling, "stop": stopping.stops(stop)}
    everything = _examples(source, loaded, settings)
    examples = everything[settings.shard :: settings.num_shards]
    engine = None if stream else _engine(loaded, verifier, len(examples), settings, mesh)
    where = Outputs(
        output_dir, source.name, len(examples), settings.shard, settings.num_shards,
        settings.part_size,
    )  # fmt: skip
    described = _describe(source, loaded, everything, how, settings)
    if stream:  # another program, in which a score's last digit may round differently
        described["stream"] = True

    def claim() -> list[int]:
        runs.claim(output_dir, described)
        config.save(output_dir)
        return where.missing()

    missing = hosts.decide(claim)
    if missing:
        began, counts = time.perf_counter(), []
        todo = [examples[i] for i in missing]
        if stream:
            decoded = _stream(loaded, todo, how, settings, mesh)
        else:
            decoded = _decode(loaded, engine, todo, how, settings)
        lines = _lines(loaded, examples, decoded, settings, counts)
        if hosts.leads():
            where.collect(lines)
            _report(where, counts, time.perf_counter() - began)
        else:
            collections.deque(lines, maxlen=0)
    return epath.Path(hosts.decide(lambda: str(where.join())))


def evaluate(
    infer: Callable[[], epath.Path], source: Source, settings: Settings = Settings()
) -> dict[str, float]:
    """Decodes a source, then scores it.

    Writes one line to ``<task>-metrics.jsonl`` beside the predictions.

    Args:
      infer: `infer` with all its arguments bound.
      source: what it decodes.
      settings: how it decodes.

    Returns:
      The task's metrics; nothing in processes other than the first.

    Raises:
      ValueError: see `infer`; or there are no references, or more than one shard.
    """
    if settings.num_shards > 1:
        raise ValueError("a score needs the whole task: num_shards must be 1")
    source.check_scorable()
    final = infer()
    if not hosts.leads():
        return {}
    lines = [json.loads(line) for line in sources.read_lines(final)]
    examples = [Example(i, np.zeros(0, np.int32), line["inputs"]) for i, line in enumerate(lines)]
    found = source.score(examples, [line["prediction"] for line in lines])
    file = final.parent / f"{source.name}-metrics.jsonl"
    file.write_text(json.dumps({"examples": len(lines), **found}) + "\n")
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()) + f": {file}")
    return found


def _examples(source: Source, loaded: System, settings: Settings) -> list[Example]:
    """All shards' examples; all of them are checked, so that every shard refuses alike."""
    found = source.read(loaded.vocabulary)
    if not found:
        raise ValueError(f"{source.name} has no examples")
    shorten = loaded.vocabulary.shorten
    return sources.cut(found, settings.input_length, settings.truncate, shorten)


def _describe(source, loaded, examples, how: dict, settings: Settings) -> dict:
    """What makes two runs the same; shards of one run differ in nothing that is said here.

    Batch sizes count: a program of another shape may round the last digit of a score differently.
    """
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.inputs.tobytes() + json.dumps(example.text).encode())
    kept = {k: v for k, v in dataclasses.asdict(settings).items() if k != "shard"}
    return kept | {
        "task": source.name,
        "examples": digest.hexdigest()[:16],
        "vocabulary": loaded.vocabulary.fingerprint[:16],
        "model": repr(loaded.target),
        "target": structure.fingerprint(loaded.params.target),
        "draft": structure.fingerprint(loaded.params.draft),
        "drafter": repr(loaded.drafter),
        **{name: repr(value) for name, value in how.items()},
    }


def _engine(
    loaded: System,
    verifier: Verifier,
    count: int,
    settings: Settings,
    mesh: Mesh | None,
) -> Refill:
    """The batch of a shard of ``count`` examples: the same however many are left to decode."""
    decoder = Decoder(
        loaded.target,
        settings.max_decode_len,
        loaded.drafter,
        verifier,
        stopping.end_ids(loaded.target),
        mesh=mesh,
    )
    shards = 1 if mesh is None else devices.row_shards(mesh)
    rows = max(1, min(settings.batch_size, count))
    rows = -(-rows // shards) * shards  # rows without a prompt stay idle
    return Refill(decoder, rows, settings.input_length, min(settings.group, rows))


def _decode(
    loaded: System, engine: Refill, examples: Sequence[Example], how: dict, settings: Settings
) -> Iterator[tuple[int, Decoded]]:
    """(example's number, its output), as rows end."""
    requests = [Request(e.number, e.inputs) for e in examples]
    key = jax.random.key(settings.seed)
    with jax.default_matmul_precision("highest"):  # TF32 would change tokens
        found = engine(loaded.params, requests, how["sampling"], key, how["stop"] or ())
        yield from progress.track(
            found, total=len(requests), description="decoding", disable=not hosts.leads()
        )


def _stream(
    loaded: System,
    examples: Sequence[Example],
    how: dict,
    settings: Settings,
    mesh: Mesh | None,
) -> Iterator[tuple[int, Decoded]]:
    """As `_decode`, in the examples' order, while the texts are printed."""
    options = how | {"stop": how["stop"] or (), "key": jax.random.key(settings.seed)}
    options["max_decode_len"] = settings.max_decode_len
    with jax.default_matmul_precision("highest"):
        yield from streaming.decode(loaded, examples, settings.input_length, mesh, **options)


def _lines(
    loaded: System, examples: Sequence[Example], decoded, settings: Settings, counts: list
) -> Iterator[tuple[int, dict]]:
    """(place in the shard, line of the file); the outputs are appended to ``counts``."""
    for number, out in decoded:
        place = number // settings.num_shards
        ids = out.tokens[: out.lengths].tolist()
        line = {"inputs": examples[place].text, "prediction": loaded.vocabulary.decode(ids)}
        if settings.include_tokens:
            line["prediction_tokens"] = ids
        if settings.include_aux:
            line["aux"] = _aux(out)
        counts.append(out)
        yield place, line


def _aux(out: Decoded) -> dict:
    return {
        "scores": float(out.scores),
        "length": int(out.lengths),
        "finish_reason": REASONS[int(out.finish_reason)],
        "rounds": int(out.stats.rounds),
        "drafted": int(out.stats.drafted),
        "accepted": int(out.stats.accepted),
    }


def _report(where: Outputs, decoded: list[Decoded], seconds: float) -> None:
    """Prints and keeps what this start of the run decoded, compiling included."""
    total = stats.summary(jax.tree.map(lambda *x: np.stack(x), *(out.stats for out in decoded)))
    ended = [REASONS[int(out.finish_reason)] for out in decoded]
    total |= {"examples": len(decoded), "seconds": seconds}
    total |= {f"ended_by_{reason}": ended.count(reason) for reason in REASONS[1:]}
    total["tokens_per_second"] = total["emitted"] / seconds
    file = where.final.parent / where.final.name.replace("-predict.", "-infer.")
    before = file.read_text() if file.exists() else ""
    file.write_text(before + json.dumps(total) + "\n")
    shown = f"{len(decoded)} examples, {total['emitted']} tokens, {seconds:.1f} s with compiling"
    if total["drafted"]:
        shown += f", {total['block_efficiency']:.2f} tokens a round"
    shown += f", {total['ended_by_length']} cut at the length limit"
    print(f"{shown}: {where.final}")
    if total["ended_by_error"]:
        print(f"warning: {total['ended_by_error']} outputs end where the target's logits were NaN")
