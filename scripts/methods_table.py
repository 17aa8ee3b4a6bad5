"""Measured methods beside what the papers print of them: docs/methods.md and docs/heads.md.

  python scripts/methods_table.py runs/smollm2_methods{,_long,_t1} runs/debian_methods
  python scripts/methods_table.py --page=heads --trained ~/.cache/specjax/runs/*_{eagle,medusa} \\
      -- runs/debian_heads runs/smollm2_heads

Reads the report.json that `bench` wrote into each folder (configs/examples/*_{methods,heads}.gin), and copies
the pictures; of heads also what their training runs say of held-out text. What the page says of other runs
stays as it is: they may have been made elsewhere.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Iterable

import jax

from specjax import checkpoints
from specjax.analysis import published
from specjax.analysis.published import Figure
from specjax.models import families
from specjax.models.joint import JointConfig

DOCS = pathlib.Path(__file__).parents[1] / "docs"
METHODS = """# Methods side by side

Written by `python scripts/methods_table.py`. Speed-up end to end (prefill included) against our own plain
loop, same weights, interleaved runs, medians; τ: tokens per step; every method's setting was chosen on one
half of the prompts and is reported on the other. "Published" is what the methods' own papers and two
comparisons print for the nearest task, by the numbers at the end: other models on accelerators, where
verifying 64 tokens costs about as much as one.

On two CPU cores it does not: behind short prompts reading 4 tokens costs 1.04 plain steps and 8 cost 1.5
(v), so trees here are small, and what drafts 7 nodes must gain half a token a step before it pays. Where
prompts are long (summarisation, retrieval: up to 1,024 ids), v is 1.25 and 1.87, and reading them is 56 and
62 % of plain decoding's time for 64 tokens, which no drafter shortens: see "without prefill". So prompt
lookup, at 1.73 and 1.60 tokens a step, is 1.44 and 1.32 times as fast without the prompts and 1.15 and 1.09
times with them. The small model has seen nothing that the target says (specjax/assets/README.md). REST's
store is code and package descriptions for SmolLM2, not chats, and the training targets of the two tasks for
the T5 pair.

`smollm2_methods` was run before prompts of 65 and more tokens were read in one fused loop, which made a
prefill of 128 tokens 1.67 times as fast and of 256 1.11 times. `smollm2_methods_t1` stood beside other work:
its τ and α count, its speed-ups do not. All were run before 4 to 256 rows were multiplied in parts of their
inputs, on both cores: behind 256 ids SmolLM2 then reads 6, 8 and 10 tokens in 1.35, 1.50 and 1.59 steps,
which were 1.59, 1.75 and 2.01 the same hour; 4 tokens cost 1.09 instead of 1.15.
"""
HEADS = """# Heads, trained here

Written by `python scripts/methods_table.py --page=heads`. Columns as in [methods.md](methods.md). All heads
were trained on this machine, two CPU cores, in minutes; the papers' were trained for hours and days on GPUs,
on models fifty times as large and more. The SmolLM2 head is the one that ships (specjax/assets/README.md).

EAGLE stands above Medusa and trees above chains in tokens a step, as published, but for chains of three on
the T5 pair, which are a level deeper than the tree beside them. In time a tree of three nodes is best
nearly everywhere: four tokens cost the target hardly more than one (v), six a third of a step more, and
each level of EAGLE 6 to 9 % of SmolLM2's step and 12 to 18 % of the T5 target's.

Of T5 the profile. Two levels and a block of four cost 1.20 plain steps here, so 1.90 tokens a step are 1.52
times plain decoding where reading the input is left out, and 1.47 times with it; 1.6 times would take 2.05.
In a quieter hour, when memory is faster, a step takes 3.0 ms (2.7 of them 69 MB of weights at the 25 GB/s
that one core gets), a level .5 to .7 (.5 for its 12.7 MB, of which the output layer of 2,500 pieces is
5.1), and both together cost 1.4 steps. What is missing is acceptance: 52 to 58 %, where the shipped draft
has 66. The head saw 2,678 updates and was still improving; the draft 16,000.

`smollm2_eagle_sampled` is `smollm2_eagle` at T = .5 and 1, on fewer prompts. The head gains less than
greedily (1.38 at T = 0 on HumanEval), 1.24 and 1.19 there and 1.15 and 1.06 on MT-bench. What a small target
draws is harder to guess, as for the papers' drafts, and a draw that is right less often has little to gain by
depth: the chain of three, which calibration chose on MT-bench at T = 1, lost on the reported half.

`debian_heads` and `smollm2_eagle`, sampled or not, are of one machine, `debian_blockwise`, `debian_medusa2`
and `smollm2_heads` of another, older one, whose cores have no AVX-512. There a block of 2 to 8 tokens costs
1.6 to 2.0 steps (v): arithmetic, not memory, is what it waits for, and nearly all drafts, of 1.1 to 2.1
tokens a step, lose. `smollm2_heads`' bound leaves out the output layer: its step is 1.53 times the true one.
These three were run before `layers.linear` multiplied few rows by halves of a weight: on the older machine
plain steps then take 11 (SmolLM2) and 30 % (T5) less and blocks of 2 to 4 of SmolLM2 15 to 21 % less. τ and α
do not depend on that. Their heads had small budgets: debian_medusa_300 and debian_blockwise 9 and 6 minutes
of a shared core, debian_medusa2 (from debian_medusa_300) 9, smollm2_medusa and smollm2_eagle3 15 and 20, on
17,650 tokens that the target said and 11,500 of others. Every loss was still falling. The shipped EAGLE saw
400,000 tokens, so what stands between it and these is mostly the training. Their held-out "code" are two
answers of 128 tokens, which repeat themselves: read nothing into these. Medusa-2's target is no longer the
shipped one: on the ten sentences of a task its text scores BLEU 6.0 and ROUGE-L 38.1, the shipped one's 8.6
and 45.7.
"""
PAGES = {"methods": METHODS, "heads": HEADS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", help="folders that bench wrote")
    parser.add_argument("--page", default="methods", choices=PAGES)
    parser.add_argument("--trained", nargs="*", default=[], help="runs that trained the heads")
    options = parser.parse_args()
    page, pictures = DOCS / f"{options.page}.md", DOCS / "img"
    sections = _sections(page)
    trained, sources = sections.pop("Training", []), _listed(sections.pop("Published", []))
    if options.trained:
        trained = _trained(map(pathlib.Path, options.trained), trained)
    pictures.mkdir(parents=True, exist_ok=True)
    for folder in map(pathlib.Path, options.reports):
        content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        lines = ["", *_facts(content), "", *_table(content["rows"], sources), ""]
        if (folder / "methods.png").exists():
            name = f"{folder.name}.png"
            shutil.copy(folder / "methods.png", pictures / name)
            lines += [f"![Methods by task](img/{name})", ""]
        sections[folder.name] = lines
    sources = [f"{i}. {text}" for i, text in enumerate(sources, 1)]
    sections = ({"Training": trained} if trained else {}) | sections
    sections |= {"Published": ["", *sources, ""]}
    lines = [PAGES[options.page]]
    for name, section in sections.items():
        lines += [f"## {name}", *section]
    page.write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {page}")


def _sections(page: pathlib.Path) -> dict[str, list[str]]:
    """Lines of a page below each of its headings; of no page none."""
    found: dict[str, list[str]] = {}
    section: list[str] = []  # before the first heading: the page's text, which is written anew
    for line in page.read_text(encoding="utf-8").splitlines() if page.exists() else ():
        if line.startswith("## "):
            section = found.setdefault(line.removeprefix("## "), [])
        else:
            section.append(line)
    return found


def _listed(lines: Iterable[str]) -> list[str]:
    """The sources that a page names, in the order of their numbers."""
    return [line.split(". ", 1)[1] for line in lines if line]


def _trained(runs: Iterable[pathlib.Path], before: Iterable[str] = ()) -> list[str]:
    """A table of what runs say of held-out text at their newest evaluation; of several heads or steps all.

    Rows of other runs stay as they were ``before``.
    """
    runs = list(runs)
    columns = ["run", "parameters of the heads", "updates", "held-out text", "top-1", "top-5"]
    lines = ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    new = {run.name for run in runs}
    for line in list(before)[3:]:
        if line and line.split("|")[1].strip() not in new:
            lines.append(line)
    for run in runs:
        read = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        newest = {row["data"]: row for row in map(json.loads, read)}
        for data in sorted(newest.keys() - {"train"}):
            row = newest[data]
            if row.get("tokens") == 0:  # of a run from before such sets were refused
                continue
            tops = [" / ".join(f"{row[n]:.2f}" for n in sorted(row) if n.startswith(f"top{k}"))
                    for k in (1, 5)]  # fmt: skip
            cells = [run.name, f"{_size(run) / 1e6:.1f} M", str(row["step"]), data, *tops]
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _size(run: pathlib.Path) -> int:
    """Parameters of heads, without what they take from their target."""
    config = checkpoints.infer_config(run)
    if isinstance(config, JointConfig):  # Medusa-2's run holds the target too
        config = config.heads
    if not hasattr(config, "alone"):
        sys.exit(f"methods_table: {run} trains no heads")
    alone = families.of(dataclasses.replace(config, alone=True))
    return sum(leaf.size for leaf in jax.tree.leaves(alone.abstract()))


def _known(row: dict, sources: list[str]) -> str:
    """What is printed of a row's method and task; new sources are added to the list."""
    task, method = row["task"].removeprefix("spec_bench_"), row["method"].partition(",")[0]
    return (
        "; ".join(_cited(f, sources) for f in published.of(method, task, row["temperature"])) or "–"
    )


def _cited(figure: Figure, sources: list[str]) -> str:
    text = f"{figure.source}: {figure.model}"
    if text not in sources:
        sources.append(text)
    tau = f" (τ {figure.tau:.2f})" if figure.tau else ""
    return f"{figure.speedup}{tau} [{sources.index(text) + 1}]"


def _facts(content: dict) -> list[str]:
    machine, plain = content["machine"], content["baseline"]
    settings = content["settings"]
    text = (
        f"{machine['cpu']}, {machine['cores']} cores; {settings['sentences'] // 2} prompts a task."
    )
    if plain:
        text += f" Plain step {plain['step_ms']:.1f} ms, {plain['ratio']:.2f} times its bandwidth bound."
    if 0 not in settings["temperatures"]:
        return [text]
    compared = [r for r in content["rows"] if r["gamma"] and r["identical"] is not None]
    same = sum(r["identical"] for r in compared)
    ties = sum(d["near_tie"] for r in compared for d in r["differences"])
    return [text, f"Greedy output identical to plain decoding's in {same} of {len(compared)} rows"
            + (f" ({ties} outputs differ at near-ties)." if ties else ".")]  # fmt: skip


def _table(rows: list[dict], sources: list[str]) -> list[str]:
    columns = [
        "task",
        "T",
        "method",
        "setting",
        "speed-up",
        "quartiles",
        "without prefill",
        "τ",
        "α",
    ]
    columns += ["drafted a step", "c·γ", "v", "published"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in sorted(
        (r for r in rows if r["chosen"]), key=lambda r: (r["task"], r["temperature"])
    ):
        rounds = row["rounds"] - row["rounds_plain"]
        cells = [
            row["task"].removeprefix("spec_bench_"), f"{row['temperature']:g}", row["method"], row["setting"],
            f"{row['speedup']:.2f}",
            "–".join(f"{x:.2f}" for x in row["speedup_quartiles"]) if row["repeats"] > 1 else "–",
            f"{row['speedup_decode']:.2f}", f"{row['block_efficiency']:.2f}",
            _number(row["acceptance_rate"]), _number(row["drafted"] / max(rounds, 1)),
            _number(row["c"] and row["c"] * row["gamma"]), _number(row["v"]), _known(row, sources),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
