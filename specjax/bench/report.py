"""Reports of measurements: report.json, report.md and pictures."""

import dataclasses
import json
import os
import pathlib
import platform
import subprocess
from importlib import metadata

import gin
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.analysis import comparison, plots
from specjax.models import layers

SCHEMA_VERSION = 1

COLUMNS = {
    "task": "task",
    "method": "method",
    "batch_size": "batch",
    "temperature": "T",
    "gamma": "γ",
    "nodes": "nodes",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "speedup_quartiles": "quartiles",
    "speedup_decode": "without prefill",
    "predicted_speedup": "τ/(γc+v)",
    "predicted_from_alpha": "from α",
    "acceptance_rate": "α",
    "block_efficiency": "τ",
    "c": "c",
    "v": "v",
    "identical": "identical",
}

# Left out where the table must fit a terminal.
NARROW = ("speedup_quartiles", "predicted_from_alpha", "c", "v", "tokens_per_second")


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything a bench run found.

    Attributes:
      rows: one per task, temperature, gamma and batch size.
      baseline: the plain step beside its bandwidth bound.
      examples: per task, scores and outputs.
      traces: per task, time lines for the trace picture.
      settings: what was asked for.
      seconds: the whole run.
      profile: where the rounds' time goes, from a profile; empty where none was asked for.
    """

    rows: list[dict]
    baseline: dict
    examples: dict
    traces: dict
    settings: dict
    seconds: float
    profile: list[dict] = dataclasses.field(default_factory=list)

    @property
    def identical(self) -> bool | None:
        """Whether all greedy output equals plain decoding's; None if none was compared."""
        found = [r["identical"] for r in self.rows if r["gamma"] and r["identical"] is not None]
        return all(found) if found else None

    def prediction_error(self, batch_size: int | None = None) -> float | None:
        """Median over rows (of a batch size) of |predicted / measured - 1|, both without prefill."""
        errors = [
            abs(r["predicted_speedup"] / r["speedup_decode"] - 1)
            for r in self.rows
            if r["predicted_speedup"] and batch_size in (None, r["batch_size"])
        ]
        return float(np.median(errors)) if errors else None

    def prediction_errors(self) -> dict[str, float | None]:
        """`prediction_error` of all rows and of each batch size."""
        sizes = sorted({r["batch_size"] for r in self.rows})
        by_size = {f"batch {size}": self.prediction_error(size) for size in sizes}
        return {"all": self.prediction_error()} | by_size

    @property
    def alpha_prediction_gap(self) -> float | None:
        """Median over rows of predicted_from_alpha / predicted_speedup - 1."""
        gaps = [
            r["predicted_from_alpha"] / r["predicted_speedup"] - 1
            for r in self.rows
            if r["predicted_speedup"] and r["predicted_from_alpha"]
        ]
        return float(np.median(gaps)) if gaps else None


def write(report: Report, folder: pathlib.Path) -> None:
    """Writes report.json, report.md, config.gin and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema_version": SCHEMA_VERSION,
        "machine": machine_facts(),
        "versions": versions(),
        "git_revision": git_revision(),
        "gin_config": gin.operative_config_str(),
        "seconds": report.seconds,
        "settings": report.settings,
        "prediction_error": report.prediction_errors(),
        "alpha_prediction_gap": report.alpha_prediction_gap,
        "baseline": report.baseline,
        "profile": report.profile,
        "rows": report.rows,
        "examples": report.examples,
    }
    (folder / "report.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))
    (folder / "config.gin").write_text(content["gin_config"])
    pictures = draw(report, folder)
    (folder / "report.md").write_text(markdown(report, content, pictures))


def draw(report: Report, folder: pathlib.Path) -> list[str]:
    """Draws the pictures that the rows allow; returns their file names."""
    speculative = [row for row in report.rows if row["gamma"]]
    chains = [row for row in report.rows if row["setting"] == str(row["gamma"])]
    names = []
    if len(chains) > sum(not row["gamma"] for row in chains):
        plots.speedup_against_gamma(chains, folder / "speedup.png")
        plots.acceptance_by_position([r for r in chains if r["gamma"]], folder / "acceptance.png")
        names += ["speedup.png", "acceptance.png"]
    if len({row["method"] for row in speculative}) > 1:
        comparison.methods(speculative, folder / "methods.png")
        names.append("methods.png")
    for task, rounds in report.traces.items():
        plots.trace(rounds, folder / f"trace-{task}.png")
        names.append(f"trace-{task}.png")
    if report.baseline:
        plots.bandwidth([report.baseline], folder / "bandwidth.png")
        names.append("bandwidth.png")
    return names


def machine_facts() -> dict:
    """Processor (and whether its vectors are long, which decides how weights are laid out), cores, system."""
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next(
            (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), model
        )
        model += " with AVX-512" if layers.long_vectors() else " without AVX-512"
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str | None]:
    """Versions of what the figures depend on; None for what is not installed as a package."""
    found = {}
    for name in ("jax", "jaxlib", "flax", "numpy", "specjax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_revision() -> str | None:
    """The commit of the source tree, with ``+`` when it was changed; None outside a checkout."""
    here = pathlib.Path(__file__).resolve().parent

    def git(*args: str) -> str:
        call = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
        return call.stdout.strip()

    try:
        if git("rev-parse", "--show-toplevel") != str(here.parents[1]):
            return None
        revision = git("rev-parse", "--short=12", "HEAD")
        return (revision + ("+" if git("status", "--porcelain") else "")) or None
    except OSError:  # no git here
        return None


def cell(key: str, value) -> str:
    """A value as the tables show it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return "–".join(f"{x:.2f}" for x in value)
    if key == "tokens_per_second":
        return f"{value:.0f}"
    return (
        f"{value:.3f}" if key == "c" else f"{value:.2f}" if isinstance(value, float) else str(value)
    )


def columns_of(rows: list[dict], leave_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The table's columns; the method is named where there are several that draft."""
    drafted = [row for row in rows if row["gamma"]]
    out = leave_out if len({row["method"] for row in drafted}) > 1 else (*leave_out, "method")
    if all(row["nodes"] == row["gamma"] for row in drafted):
        out = (*out, "nodes")
    return tuple(key for key in COLUMNS if key not in out)


def _cells(row: dict, columns: tuple[str, ...]) -> list[str]:
    values = [cell(key, row.get(key)) for key in columns]
    gamma = columns.index("gamma")
    values[gamma] = f"{row['setting']}{' *' if row['chosen'] else ''}" if row["gamma"] else "plain"
    return values


def markdown(report: Report, content: dict, pictures: list[str]) -> str:
    """report.json for a reader."""
    facts, lines = content["machine"], ["# Plain and speculative decoding, side by side", ""]
    columns = columns_of(report.rows)
    lines += [
        f"{facts['cpu']}, {facts['cores']} cores; jax {content['versions']['jax']}; revision "
        f"{content['git_revision']}; {report.seconds:.0f} s.",
        "",
        "Speed-up: plain seconds per emitted token over the method's, end to end (prefill included), "
        "same weights, interleaved; medians and quartiles over repeats. `*`: the γ, or setting, chosen on "
        "the calibration half; speed-ups, α and τ are of the other half: "
        f"{report.settings.get('sentences', 0) // 2} sentences of each task with inputs of fewer than "
        f"{report.settings.get('input_length')} pieces, the first such in a fixed random order.",
        "",
        "| " + " | ".join(COLUMNS[key] for key in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(_cells(row, columns)) + " |" for row in report.rows]
    lines += ["", *_prediction_lines(report), "", *_baseline_lines(report.baseline)]
    lines += ["", *_profile_lines(report.profile), "", *_difference_lines(report.rows)]
    for task, found in report.examples.items():
        scores = ", ".join(f"{name} {value:.1f}" for name, value in found["scores"].items())
        lines += ["", f"## {task}: {scores}", ""]
        for one in found["outputs"][:4]:
            lines += [
                f"- input: {one['input']}",
                f"  - plain: {one['plain']}",
                f"  - speculative ({_how(one['method'], one['setting'])}): {one['speculative']}",
                f"  - reference: {one['reference']}",
            ]
    lines += ["", *(f"![{name}]({name})" for name in pictures)]
    return "\n".join(lines) + "\n"


def _prediction_lines(report: Report) -> list[str]:
    errors = {k: v for k, v in report.prediction_errors().items() if v is not None}
    if not errors:
        return []
    text = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    lines = [
        f"τ/(γc+v) is off the measured speed-up without prefill by (median over rows): {text}. "
        "c (what drafting adds to a round) and v (a round whose drafting is free) are timed in "
        "turns with the plain step, in loops of their own on the calibration half. In a batch the "
        "slowest row sets the rounds, which τ does not know.",
    ]
    if report.alpha_prediction_gap is None:  # it speaks of chains only
        return lines
    return [
        *lines,
        f"The prediction from α (Theorem 3.8 with v) is {report.alpha_prediction_gap:+.1%} from "
        "τ/(γc+v) (median): it takes acceptances for independent with one rate, where they cluster; "
        "it counts whole blocks, where EOS and the length limit cut the last.",
    ]


def _baseline_lines(baseline: dict) -> list[str]:
    if not baseline:
        return []
    probes = ", ".join(f"{k} {v:.1f}" for k, v in baseline["probes_gb_per_second"].items())
    return [
        f"The plain step takes {baseline['step_ms']:.2f} ms, {baseline['ratio']:.2f} times its "
        f"memory-bandwidth bound of {baseline['bound_ms']:.2f} ms "
        f"({baseline['bytes_per_step'] / 1e6:.1f} MB a step; probes in GB/s: {probes})."
    ]


def _profile_lines(profile: list[dict]) -> list[str]:
    if not profile:
        return []
    names = ("method", "gamma", "batch_size", "draft", "verify", "commit", "rest", "c")
    return [
        "A round in milliseconds, from a profile of the compiled loop (profiling itself costs time, so "
        "compare shares); c = draft / γ over the plain step:",
        "",
        "| " + " | ".join(names).replace("gamma", "γ").replace("_size", "") + " |",
        "|" + "---|" * len(names),
        *("| " + " | ".join(cell(n, one[n]) for n in names) + " |" for one in profile),
    ]


def _how(method: str, setting: str) -> str:
    return f"{method}, γ = {setting}" if setting.isdigit() else f"{method} {setting}".rstrip(" –")


def _difference_lines(rows: list[dict]) -> list[str]:
    found = [(row, d) for row in rows for d in row["differences"]]
    compared = sum(r["sentences"] for r in rows if r["gamma"] and r["identical"] is not None)
    if not compared:
        return ["No greedy output was compared: all rows sample."]
    if not found:
        return [f"All {compared} greedy outputs are identical to plain decoding's."]
    return ["Greedy outputs that differ:"] + [
        f"- {row['task']}, batch {row['batch_size']}, {_how(row['method'], row['setting'])}, sentence "
        f"{d['row']}, token {d['position']}: {d['plain']} or {d['other']}, logits {d['gap']:.2e} apart"
        + (" (near-tie)" if d["near_tie"] else " (NOT a near-tie)")
        for row, d in found
    ]


def show(report: Report, console: Console, folder: pathlib.Path) -> None:
    """Prints table and examples."""
    table = Table(title="plain and speculative decoding (* γ chosen on other sentences)")
    columns = columns_of(report.rows, leave_out=NARROW)
    for key in columns:
        justify = "left" if key in ("task", "method") else "right"
        table.add_column(COLUMNS[key], justify=justify, no_wrap=True)
    for row in report.rows:
        table.add_row(*_cells(row, columns), style="bold" if row["chosen"] else None)
    for task, found in report.examples.items():
        for one in found["outputs"][:2]:
            console.print(f"[bold]{task}[/bold] {one['input']}", highlight=False)
            console.print(f"  plain        {one['plain']}", highlight=False, markup=False)
            console.print(f"  speculative  {one['speculative']}", highlight=False, markup=False)
    console.print(table)
    prose = (*_prediction_lines(report), *_baseline_lines(report.baseline))
    for line in (*prose, *_profile_lines(report.profile)):
        console.print(line, highlight=False)
    for line in _difference_lines(report.rows):
        console.print(line, highlight=False)
    console.print(f"report: {folder / 'report.md'}", highlight=False)
