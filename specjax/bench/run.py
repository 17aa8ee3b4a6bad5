"""``--run_mode=bench``: plain against speculative decoding on held-out text, and the report of it."""

import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from specjax import assets, runs
from specjax.analysis import theory
from specjax.bench import harness, machine, profile, report
from specjax.bench.harness import Costs, Measured, Method, Runner, Workload
from specjax.data.sources import Heldout, Source
from specjax.data.vocabulary import Vocabulary
from specjax.decode import loop
from specjax.decode.interfaces import Drafter, Params, Prompt, Verifier
from specjax.decode.loop import Decoder
from specjax.decode.sampling import Sampling
from specjax.decode.verify import SpeculativeSampling
from specjax.drafters.small_model import SmallModel
from specjax.infer import system
from specjax.infer.system import Checkpoint
from specjax.models.eagle import Eagle
from specjax.models.eagle_t5 import EagleT5
from specjax.models.ensemble import Ensemble
from specjax.models.families import Network
from specjax.models.medusa import Medusa


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      tasks: names of held-out samples, where no sources are given.
      temperatures, gammas, batch_sizes: all combinations are run; gamma 0 is the plain loop.
      sentences: per task; one half chooses gamma, the other is reported.
      repeats: interleaved repeats of the reported half at batch size 1.
      batch_repeats: the same at larger batch sizes.
      calibration_repeats: of the other half.
      input_length: longer inputs are left out (never cut).
      max_decode_len: tokens at most, EOS included.
      only_chosen: report of every method only what was chosen on the other half.
      seed: of sampling.
    """

    tasks: tuple[str, ...] = ("debian_ende", "debian_synopsis")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    gammas: tuple[int, ...] = (0, 1, 3, 5, 7)
    batch_sizes: tuple[int, ...] = (1, 8)
    sentences: int = 64
    repeats: int = 5
    batch_repeats: int = 3
    calibration_repeats: int = 1
    input_length: int = 64
    max_decode_len: int = 128
    only_chosen: bool = False
    seed: int = 0

    def __post_init__(self):
        for name in ("tasks", "temperatures", "gammas", "batch_sizes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if 0 not in self.gammas:
            raise ValueError(
                "gammas must hold 0, the plain loop that speed-ups are measured against"
            )
        if min(self.gammas) < 0:
            raise ValueError(f"gamma must not be negative, got {min(self.gammas)}")
        for temperature in self.temperatures:
            Sampling(temperature).check()
        if (
            self.sentences < 2
            or min(self.repeats, self.batch_repeats, self.calibration_repeats) < 1
        ):
            raise ValueError("at least 2 sentences and 1 repeat of each kind are needed")
        for name in ("batch_sizes", "input_length", "max_decode_len"):
            if np.min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def bench(
    settings: Settings = Settings(),
    output_dir: str = "runs/bench",
    target: Checkpoint | None = None,
    drafts: Mapping[str, system.Draft] | None = None,
    sources: Sequence[Source] = (),
    verifiers: Mapping[str, Verifier] | None = None,
    methods: Mapping[str, Sequence[Drafter | Callable[..., Drafter]]] | None = None,
    profile_dir: str | None = None,
) -> report.Report:
    """Measures decoding with drafts against plain decoding.

    Writes report.json, report.md and pictures to ``output_dir``.

    Args:
      settings: what is measured.
      output_dir: where the report goes.
      target: the shipped pair's where none is given.
      drafts: what methods decode with, by their name in the report: a model, with which chains of all
        gammas are drafted, or what ``methods`` of that name need. The shipped pair's draft where no
        target is given.
      sources: what is decoded; the held-out samples of ``settings.tasks`` by default.
      verifiers: further lossless acceptance rules by name; every draft is measured with each of them
        too, where it drafts chains if the rule judges chains only.
      methods: further drafters by name, each with all settings that are tried; like gamma, the fastest
        of them on one half of the examples is the one chosen for the other. One that needs a model is
        given as a function of ``model=``, which is the draft of that name, and of ``inner=`` where that is
        `system.Stages`.
      profile_dir: where profiles of some rounds of every method go; the report then says where a
        round's time goes, and c from that too.

    Raises:
      ValueError: a checkpoint does not fit, or a source has too few examples that fit.
      SystemExit: greedy output differed from plain decoding's by more than near-ties (the report is
        written first).
    """
    if jax.process_count() > 1:
        raise ValueError("bench measures one process on one device; start it without --multihost")
    began, folder = time.perf_counter(), pathlib.Path(runs.local(output_dir, "reports"))
    for rule, temperature in itertools.product((verifiers or {}).values(), settings.temperatures):
        getattr(rule, "check", lambda _: None)(Sampling(temperature))
    lossy = [name for name, rule in (verifiers or {}).items() if not rule.lossless]
    if lossy:
        raise ValueError(f"{', '.join(lossy)}: no lossless rule, its output is not the target's")
    contest = _shipped() if target is None else _load(target)
    contest = contest._replace(verifiers=verifiers or {}, methods=methods or {})
    contest = _with_drafts(contest, drafts or {})
    given = tuple(sources) or tuple(Heldout(task) for task in settings.tasks)
    names = [source.name for source in given]
    if len(set(names)) < len(names):
        raise ValueError(
            f"two sources have one name, the report could not tell them apart: {names}"
        )
    with jax.default_matmul_precision("highest"):  # TF32 is no basis for comparing tokens
        result = _measure(settings, contest, given, profile_dir)
    result = dataclasses.replace(result, seconds=time.perf_counter() - began)
    report.write(result, folder)
    # Where no terminal says how wide it is, the table is as wide as it needs.
    report.show(result, Console(width=None if sys.stdout.isatty() else 130), folder)
    if result.identical is False:
        raise SystemExit(f"greedy outputs differ from plain decoding's; see {folder / 'report.md'}")
    return result


class Contest(NamedTuple):
    """What is compared.

    Attributes:
      label: the target's name in the report.
      target: the target.
      drafts: the draft models, by the name of their method.
      params: weights; ``params.draft`` by name too.
      vocabulary: of all of them.
      verifiers: further acceptance rules, by name.
      methods: further drafters, by name.
    """

    label: str
    target: Network
    drafts: dict[str, Network]
    params: Params
    vocabulary: Vocabulary
    verifiers: Mapping[str, Verifier] = {}
    methods: Mapping[str, Sequence[Drafter]] = {}


def _shipped() -> Contest:
    pair, name = assets.load_pair(), "small model"
    params = Params(pair.target_params, {name: pair.draft_params})
    return Contest("debian pair", pair.target, {name: pair.draft}, params, pair.vocabulary)


def _load(target: Checkpoint) -> Contest:
    alone = system.load(target)
    params = Params(alone.params.target, {})
    return Contest(str(target.path), alone.target, {}, params, alone.vocabulary)


def _with_drafts(contest: Contest, drafts: Mapping[str, system.Draft]) -> Contest:
    models, weights = dict(contest.drafts), dict(contest.params.draft)
    inside = {}  # what drafts for a draft, by the method's name
    for name, draft in drafts.items():
        if isinstance(draft, system.Stages):
            models[name], inner, weights[name] = draft.of(contest.target, contest.vocabulary)
            inside[name] = {"inner": inner}
            continue
        if isinstance(draft, system.Several):
            models[name], weights[name] = draft.of(contest.target, contest.vocabulary)
            continue
        if isinstance(draft, system.Heads):
            models[name], weights[name] = draft.of(contest.target, contest.params.target)
            continue
        if not isinstance(draft, Checkpoint):
            draft.check(contest.target, contest.vocabulary)
        model, weights[name] = draft.load()
        if model is not None:
            system.check_same_pieces(contest.vocabulary, contest.target, model, draft)
            models[name] = model
    others = Eagle | EagleT5 | Medusa | Ensemble
    named = {n for n, m in models.items() if isinstance(m, others)} | inside.keys()
    lacking = sorted(named - contest.methods.keys())
    if lacking:
        raise ValueError(
            f"{', '.join(lacking)}: heads, stages and several models draft by a drafter of their own; "
            "name it in methods"
        )
    bare = [
        n for n, tried in contest.methods.items() if n not in models and any(map(callable, tried))
    ]
    if bare:
        raise ValueError(
            f"{', '.join(bare)}: a drafter that needs a model, and no draft of that name"
        )
    methods = {
        name: [d(model=models[name], **inside.get(name, {})) if callable(d) else d for d in tried]
        for name, tried in contest.methods.items()
    }
    params = Params(contest.params.target, weights)
    return contest._replace(drafts=models, params=params, methods=methods)


def _measure(
    settings: Settings, contest: Contest, given: Sequence[Source], profile_dir: str | None
) -> report.Report:
    runner = Runner(contest.target, settings.max_decode_len, settings.seed)
    methods, params = _methods(settings, contest), contest.params
    probes = machine.bandwidth_probes()
    examples = {s.name: harness.halves(s, contest.vocabulary, settings.input_length) for s in given}
    rows, traces, shown, profiled = [], {}, {}, []
    with harness.progress() as bar:
        bar_task = bar.add_task("compiling", total=_total(settings, len(given)))
        for batch_size in settings.batch_sizes:
            bar.update(bar_task, description=f"compiling, batch {batch_size}")
            work = _workloads(settings, examples, batch_size)
            parts = _Parts.measure(runner, methods, params, work)
            if profile_dir:
                profiled += _profile(runner, methods, params, work, profile_dir, batch_size)
            for source, temperature in itertools.product(given, settings.temperatures):
                task = source.name
                title = f"{task}, T = {temperature:g}, batch {batch_size}"
                bar.update(bar_task, description=title)
                cell = _Cell(
                    contest.label, runner, methods, params, work[task], temperature, batch_size,
                    parts,
                )  # fmt: skip
                found, reported, costs = cell.measure(settings, lambda: bar.advance(bar_task))
                rows += found
                if not bar.console.is_terminal:  # a bar would be seen at its end only
                    bar.console.print(f"{title}: done after {bar.tasks[0].elapsed:.0f} s")
                if temperature == 0 and batch_size == min(settings.batch_sizes):
                    workload = work[task]["report"]
                    shown[task] = _examples(source, contest.vocabulary, workload, reported, found)
                    chains = [
                        m for m in reported if m.drafter is None or type(m.drafter) is SmallModel
                    ]
                    if len(chains) > 1:
                        traces[task] = _trace(_best_draft(chains, found), reported, costs)
    prompt = next(iter(work.values()))["report"].prompts[0]
    return report.Report(
        rows=rows,
        baseline=_baseline(contest.label, runner, params, rows, probes, prompt),
        examples=shown,
        traces=traces,
        settings=dataclasses.asdict(settings),
        seconds=0.0,
        profile=profiled,
    )


def _profile(
    runner: Runner, methods: list[Method], params: Params, work: dict, place: str, batch_size: int
) -> list[dict]:
    """A row of the report per method: milliseconds by scope, and c."""
    prompt = next(iter(work.values()))["calibration"].prompts[0]
    folder = pathlib.Path(place).expanduser() / f"batch-{batch_size}"
    parts = profile.profile(runner, methods, params, prompt, folder)
    plain = parts[methods[0]]
    return [
        {"method": m.name, "gamma": m.label, "batch_size": batch_size}
        | part._asdict()
        | {"c": profile.c(part, plain, m.gamma) if m.gamma else None}
        for m, part in parts.items()
    ]


def _best_draft(methods: list[Method], rows: list[dict]) -> list[Method]:
    """Plain decoding, and all gammas of the draft that was fastest where it was chosen."""
    names = {m.name for m in methods}
    rows = [row for row in rows if row["method"] in names]
    best = max(rows, key=lambda row: (row["chosen"], row["speedup"]))["method"]
    return [m for m in methods if not m.gamma or m.name == best]


def _methods(settings: Settings, contest: Contest) -> list[Method]:
    rules = {"": SpeculativeSampling()} | {f", {n}": rule for n, rule in contest.verifiers.items()}
    chains = {
        name: [(None, SmallModel(draft, g)) for g in sorted(settings.gammas) if g]
        for name, draft in contest.drafts.items()
        if name not in contest.methods
    }
    others = {name: harness.told_apart(tried) for name, tried in contest.methods.items()}
    drafted = [
        Method(name + suffix, drafter.depth, drafter, rule, name, setting)
        for name, tried in (chains | others).items()
        for suffix, rule in rules.items()
        for setting, drafter in tried
        if getattr(drafter, "chain", False) or not getattr(rule, "chains_only", False)
    ]
    return [Method("plain"), *drafted]


def _repeats(settings: Settings, batch_size: int) -> int:
    return settings.repeats if batch_size == 1 else settings.batch_repeats


def _total(settings: Settings, tasks: int) -> int:
    """Steps of the progress bar: batches, with their repeats, over all cells."""
    batches = sum(
        _batches(settings, b) * (_repeats(settings, b) + settings.calibration_repeats)
        for b in settings.batch_sizes
    )
    return batches * tasks * len(settings.temperatures)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What is timed once per batch size, on calibration prompts.

    Attributes:
      compiled: seconds of compiling, per method.
      costs: of a round and its parts, per speculative method.
    """

    compiled: dict[Method, float]
    costs: dict[Method, Costs]

    @classmethod
    def measure(cls, runner: Runner, methods: list[Method], params: Params, halves: dict):
        workload = next(iter(halves.values()))["calibration"]
        return cls(
            harness.warm_up(runner, methods, params, workload),
            Costs.measure(runner, methods, params, workload.prompts[0]),
        )


def _batches(settings: Settings, batch_size: int) -> int:
    return -(-(settings.sentences // 2) // batch_size)


def _workloads(
    settings: Settings, examples: dict[str, dict], batch_size: int
) -> dict[str, dict[str, Workload]]:
    sizes = (settings.sentences // 2, settings.input_length, batch_size)
    return {
        task: {half: harness.make_workload(task, half, e, *sizes) for half, e in found.items()}
        for task, found in examples.items()
    }


@dataclasses.dataclass(frozen=True)
class _Cell:
    """One task at one temperature and batch size."""

    label: str
    runner: Runner
    methods: list[Method]
    params: Params
    halves: dict[str, Workload]
    temperature: float
    batch_size: int
    parts: _Parts

    def measure(self, settings: Settings, tick) -> tuple[list[dict], dict, dict]:
        """(rows of the report, the reported half's runs, costs measured on the other half)."""
        run = lambda half, repeats, methods=self.methods: harness.measure(  # noqa: E731
            self.runner,
            methods,
            self.params,
            self.halves[half],
            self.temperature,
            repeats,
            tick,
        )
        calibration = run("calibration", settings.calibration_repeats)
        costs = self.parts.costs
        chosen = [self._fastest(name, calibration) for name in self._drafts()]
        plain = self.methods[0]
        shown = [plain, *chosen] if settings.only_chosen else self.methods
        reported = run("report", _repeats(settings, self.batch_size), shown)
        for measured in reported.values():
            harness.check_finished(measured)
        rows = [self._row(m, reported, costs, m in chosen) for m in shown]
        return rows, reported, costs

    def _drafts(self) -> list[str]:
        return list(dict.fromkeys(m.name for m in self.methods if m.gamma))

    def _fastest(self, name: str, measured: dict[Method, Measured]) -> Method:
        """A draft's best gamma."""
        own = [m for m in self.methods if m.gamma and m.name == name]
        return min(own, key=lambda m: np.median(measured[m].per_token()))

    def _row(self, method: Method, reported: dict, costs: dict, chosen: bool) -> dict:
        plain, own = reported[self.methods[0]], reported[method]
        workload = self.halves["report"]
        row = {
            "task": workload.task,
            "model": self.label,
            "method": method.name,
            "temperature": self.temperature,
            "gamma": method.gamma,
            "setting": method.label,
            "nodes": method.nodes,
            "batch_size": self.batch_size,
            "sentences": sum(workload.real),
            "chosen": chosen,
            "repeats": len(own.runs),
            "tokens": int(own.tokens().sum()),
            "seconds": float(own.seconds().sum()),
            "prefill_seconds": float(own.seconds("prefill_seconds").sum()),
            "tokens_per_second": float(np.median(own.tokens() / own.seconds())),
        }
        for key, part in (("speedup", "seconds"), ("speedup_decode", "decode_seconds")):
            ratios = plain.per_token(part) / own.per_token(part)
            row[key] = float(np.median(ratios))
            row[f"{key}_quartiles"] = [float(q) for q in np.percentile(ratios, [25, 75])]
        row |= {"compile_seconds": self.parts.compiled[method]} | own.summary()
        row |= self._predictions(method, row, costs)
        return row | self._equality(plain, own)

    def _predictions(self, method: Method, row: dict, costs: dict[Method, Costs]) -> dict:
        """tau / (gamma c + v), and Theorem 3.8 with v; both speak of decoding without prefill."""
        none = dict.fromkeys(("c", "v", "predicted_speedup", "predicted_from_alpha"))
        if not method.gamma:
            return none
        c, v = costs[method].c(method.gamma), costs[method].v
        tau, alpha = row["block_efficiency"], row["acceptance_rate"]
        if alpha is None:
            return none
        predicted = theory.speedup_from_block_efficiency(tau, method.gamma, c, v)
        out = none | {"c": c, "v": v, "predicted_speedup": float(predicted)}
        if type(method.drafter) is SmallModel:  # the theorem speaks of gamma drafts in every round
            out["predicted_from_alpha"] = float(theory.walltime_factor(alpha, method.gamma, c, v))
        return out

    def _equality(self, plain: Measured, own: Measured) -> dict:
        """Whether greedy output equals plain decoding's (near-ties listed); None when sampling."""
        if self.temperature > 0:
            return {"identical": None, "differences": []}
        found = harness.differences(
            self.runner, self.params, self.halves["report"], plain.runs[0], own.runs[0]
        )
        return {
            "identical": all(d.near_tie for d in found),
            "differences": [d._asdict() for d in found],
        }


def _examples(
    source: Source, vocabulary: Vocabulary, workload: Workload, reported: dict, rows: list[dict]
) -> dict:
    """Example outputs, and the scores of the greedy text."""
    plain = harness.texts(vocabulary, reported[min(reported, key=lambda m: m.gamma)].runs[0])
    best = max(rows, key=lambda row: (row["chosen"], row["speedup"]))
    chosen = next(m for m in reported if (m.name, m.label) == (best["method"], best["setting"]))
    spec = harness.texts(vocabulary, reported[chosen].runs[0])
    listed = [
        {
            "input": e.text["inputs_pretokenized"],
            "reference": e.text.get("targets_pretokenized"),
            "plain": p,
            "speculative": s,
            "method": best["method"],
            "setting": best["setting"],
        }
        for e, p, s in zip(workload.examples, plain, spec, strict=True)
    ]
    known = all(line["reference"] is not None for line in listed)
    return {"scores": source.score(workload.examples, plain) if known else {}, "outputs": listed}


def _trace(methods: list[Method], reported: dict, costs: dict[Method, Costs]) -> list[dict]:
    """Time line of one sentence, a row per gamma, from measured costs and its own rounds."""
    index = _typical(reported[methods[0]])
    runs = {m: [repeat[index] for repeat in reported[m].runs] for m in methods}
    prefill = {m: _median_ms(runs[m], "prefill_seconds") for m in methods}
    out = []
    for method in methods:
        encoder = min(prefill[methods[0]], prefill[method])
        events = [_event("target encoder", 0.0, encoder)]
        if method.gamma and not method.drafter.taps:  # else it reads the target's encoder output
            events.append(_event("draft encoder", encoder, prefill[method]))
        rounds = max(int(runs[method][0].stats.rounds.max()), 1)
        whole = _median_ms(runs[method], "decode_seconds") / rounds
        drafting = costs[method].draft_seconds * 1e3 if method.gamma else 0.0
        drafting = min(drafting, whole)
        for number in range(rounds):
            events += _round(prefill[method] + number * whole, whole, drafting, method.gamma)
        out.append({"gamma": method.gamma, "events": events, "tokens": runs[method][0].emitted})
    return out


def _round(now: float, whole: float, drafting: float, gamma: int) -> list[dict]:
    """One round's events: gamma draft steps, then the target's."""
    step = drafting / max(gamma, 1)
    drafts = [_event("draft decoder", now + i * step, now + (i + 1) * step) for i in range(gamma)]
    return [*drafts, _event("target decoder", now + drafting, now + whole)]


def _median_ms(runs: list, part: str) -> float:
    return float(np.median([getattr(run, part) for run in runs])) * 1e3


def _event(lane: str, start: float, end: float) -> dict:
    return {"lane": lane, "start_ms": start, "end_ms": max(end, start)}


def _typical(measured: Measured) -> int:
    """Index of the batch whose token count is nearest to the median."""
    tokens = np.array([run.emitted for run in measured.runs[0]])
    return int(np.abs(tokens - np.median(tokens)).argmin())


def _baseline(
    label: str, runner: Runner, params: Params, rows: list[dict], probes: dict, prompt: Prompt
) -> dict:
    """The plain loop at batch 1 beside its memory-bandwidth bound; {} where it was not measured."""
    plain = [r for r in rows if r["gamma"] == 0 and r["batch_size"] == 1 and r["rounds"]]
    if not plain:
        return {}
    step = float(np.median([(r["seconds"] - r["prefill_seconds"]) / r["rounds"] for r in plain]))
    decoder = Decoder(runner.model, runner.max_decode_len)
    one = jax.tree.map(lambda x: x[:1], prompt)
    start = functools.partial(loop.start, decoder)
    state = jax.eval_shape(
        start, Params(params.target, None), one, jax.random.split(jax.random.key(0), 1)
    )
    size = machine.bytes_per_step(params.target, state.cache)
    bound = size.total / (max(probes.values()) * 1e9)
    return {
        "label": label,
        "step_ms": step * 1e3,
        "bound_ms": bound * 1e3,
        "ratio": step / bound,
        "bytes_per_step": size.total,
        "probes_gb_per_second": probes,
    }
