"""Sweeps over what drafts from text alone, and over how a tree is verified; tables and pictures of them.

  python scripts/sweep_text_drafters.py --spec_bench=question.jsonl [--datastore=store] [--only=copy,...]

Writes docs/text_drafters.md and its pictures. Parts: `copy` (node budget x depth: LLMA, parallel,
hierarchical), `rest` (datastore size x draft nodes), `lookahead` (W, N, G), `verify` (tree against
sequences, 4 to 123 nodes). Rounds of what looks at text alone are counted on recorded outputs of
SmolLM2-135M-Instruct, in the real loop (`specjax.bench.replay`); Lookahead decoding and verification run
the model. Takes about half an hour on two cores; recorded outputs and finished parts are kept in --out and
are not made again.
"""

import argparse
import functools
import itertools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from specjax import pretrained
from specjax.analysis import comparison
from specjax.bench import replay, timing
from specjax.data import datastore, prompts
from specjax.decode import loop, stats, tree
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.sampling import Sampling
from specjax.decode.verify import GreedyMatch
from specjax.drafters import rest
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.trie import Trie
from specjax.models.branches import Branches

DOCS = pathlib.Path(__file__).parents[1] / "docs"
STEPS, LENGTH = 96, 1024
NAMES = ("human_eval", *prompts.SPEC_BENCH_TASKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec_bench", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--datastore", help="a datastore of SmolLM2's ids; without it no `rest`")
    parser.add_argument("--prompts", type=int, default=10, help="per task")
    parser.add_argument("--out", default="runs/sweeps", help="what was recorded and measured")
    parser.add_argument("--only", default="copy,rest,lookahead,verify", help="parts to run")
    options = parser.parse_args()
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    said = recorded(out, options.spec_bench, options.prompts)
    parts = {"copy": copy, "lookahead": lookahead, "verify": verify}
    if options.datastore:
        parts["rest"] = functools.partial(of_datastore, options.datastore)
    for name in options.only.split(","):
        if name in parts and not (out / f"{name}.json").exists():
            rows = parts[name](said)
            (out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        write(out)


# What was said.


@functools.cache
def target():
    """SmolLM2: (model, parameters, vocabulary)."""
    return pretrained.load("smollm2-135m")


def recorded(out: pathlib.Path, spec_bench: str, count: int) -> dict[str, replay.Recorded]:
    """Plain greedy outputs of the reported half of every task's prompts, by task."""
    file = out / "said.npz"
    if not file.exists():
        model, params, vocabulary = target()
        found = {}
        for name in track(NAMES, "plain decoding"):
            source = prompts.HumanEval(half="report") if name == "human_eval" else prompts.SpecBench(
                spec_bench, name, chat=True, half="report")  # fmt: skip
            examples = [e for e in source.read(vocabulary) if len(e.inputs) <= LENGTH][:count]
            width = 256 * -(-max(len(e.inputs) for e in examples) // 256)
            for kind in ("prompt", "tokens"):
                found[f"{name}.{kind}"] = np.zeros(
                    (len(examples), width if kind == "prompt" else STEPS), np.int32
                )
                found[f"{name}.{kind}_length"] = np.zeros(len(examples), np.int32)
            for i, example in enumerate(examples):
                tokens = np.pad(example.inputs, (0, width - len(example.inputs)))[None]
                length = np.asarray([len(example.inputs)], np.int32)
                out_ = decode(model, params, Prompt(jnp.asarray(tokens), jnp.asarray(length)), None)
                for kind, row, size in (
                    ("prompt", tokens[0], length[0]), ("tokens", out_.tokens[0], out_.lengths[0]),
                ):  # fmt: skip
                    found[f"{name}.{kind}"][i] = row
                    found[f"{name}.{kind}_length"][i] = size
        np.savez_compressed(file, **found)
    with np.load(file) as arrays:
        return {
            name: replay.Recorded(
                Prompt(jnp.asarray(arrays[f"{name}.prompt"]), jnp.asarray(arrays[f"{name}.prompt_length"])),
                arrays[f"{name}.tokens"], arrays[f"{name}.tokens_length"],
            )
            for name in NAMES
        }  # fmt: skip


def decode(model, params, prompt: Prompt, drafter, draft=None) -> loop.Decoded:
    decoder = loop.Decoder(model, STEPS, drafter, GreedyMatch(), 2)
    both, batch = Params(params, draft), prompt.length.shape[0]
    keys = loop.row_keys(jax.random.key(0), jnp.arange(batch, dtype=jnp.int32))
    state = loop.jit_start(decoder, both, prompt, keys)
    state = loop.jit_run(decoder, both, state, Sampling(0.0).rows(batch))
    return jax.device_get(loop.jit_decoded(decoder, state))


def replayed(drafter, said: dict[str, replay.Recorded], draft=None) -> list[dict]:
    """Tokens per round of every task; and of all of them together."""
    model, rows, total = replay.Replay(49152, 2), [], np.zeros(3, int)
    for task, one in said.items():
        found = replay.rounds(model, drafter, draft, one)
        counts = np.asarray([found["emitted"], found["rounds"], found["drafted"]])
        total += counts
        rows.append({"task": task, "tokens_per_round": counts[0] / counts[1],
                     "drafted_per_round": counts[2] / counts[1]})  # fmt: skip
    return [*rows, {"task": "all", "tokens_per_round": total[0] / total[1],
                    "drafted_per_round": total[2] / total[1]}]  # fmt: skip


# The parts.


def copy(said: dict[str, replay.Recorded]) -> list[dict]:
    """LLMA, parallel and hierarchical branches over budget and depth."""
    rows = []
    grid = list(itertools.product((3, 7, 15, 31, 63), (4, 8, 12)))
    for budget, depth in track(grid, "copying"):
        kinds = {
            "LLMA": PromptLookup(5, 1, min(depth, budget), output=False, eos_id=2),
            "prompt lookup": PromptLookup(3, 1, min(depth, budget), eos_id=2),
        }
        if depth <= budget:
            shared = dict(depth=depth, budget=budget, outputs=budget // 2, eos_id=2)
            kinds |= {mode: Trie(mode, **shared) for mode in ("parallel", "hierarchical")}
        for kind, drafter in kinds.items():
            if kind in ("LLMA", "prompt lookup") and budget != 63:
                continue  # one span: its depth is its budget
            for row in replayed(drafter, said):
                rows.append({"method": kind, "budget": budget, "depth": depth} | row)
    return rows


def of_datastore(path: str, said: dict[str, replay.Recorded]) -> list[dict]:
    """REST over the store's size and the tree's."""
    tokens, _, _ = datastore.load(path)
    rows, whole = [], np.asarray(tokens[0])
    for size in (10**5, 10**6, 3 * 10**6, len(whole)):
        part = np.append(whole[: size - 1], np.int32(-1))[None]
        store = rest.Store(jnp.asarray(part), jnp.asarray(datastore.sort(part[0])[None]))
        for nodes in track((4, 8, 16, 32, 64), f"REST, {size:,} tokens"):
            drafter = rest.Rest(depth=min(10, nodes), nodes=nodes, retrieved=64)
            for row in replayed(drafter, said, store):
                rows.append({"size": size, "nodes": nodes} | row)
    return rows


def lookahead(said: dict[str, replay.Recorded]) -> list[dict]:
    """W, N and G of Lookahead decoding with the model itself, some prompts of three tasks."""
    model, params, _ = target()
    rows = []
    grid = [(w, n, g) for n in (3, 5) for w, g in ((1, 1), (3, 3), (7, 7), (15, 15))]
    grid += [(7, 5, 1), (7, 5, 3)]
    for w, n, g in track(grid, "Lookahead decoding"):
        drafter, total = Lookahead(w, n, g), np.zeros(2, int)
        for task in ("human_eval", "mt_bench", "math_reasoning"):
            one, counts = said[task], np.zeros(2, int)
            for i in range(3):
                prompt = Prompt(one.prompt.tokens[i : i + 1, :256], one.prompt.length[i : i + 1])
                if int(prompt.length[0]) > 256:
                    continue
                found = stats.summary(decode(model, params, prompt, drafter).stats)
                counts += (found["emitted"], found["rounds"])
            total += counts
            rows.append({"task": task, "W": w, "N": n, "G": g, "nodes": drafter.nodes,
                         "tokens_per_round": counts[0] / counts[1]})  # fmt: skip
        rows.append({"task": "all", "W": w, "N": n, "G": g, "nodes": drafter.nodes,
                     "tokens_per_round": total[0] / total[1]})  # fmt: skip
    return rows


def verify(said: dict[str, replay.Recorded]) -> list[dict]:
    """One forward over a tree, by tree attention and branch by branch: milliseconds and memory."""
    model, params, _ = target()
    prompt = jax.tree.map(lambda x: x[:1], said["human_eval"].prompt)
    cache = jax.jit(functools.partial(model.prefill, slots=136))(params, prompt).cache
    calls, rows = {}, []
    for widths in (
        (1,),
        (4,),
        (2, 1, 1),
        (2, 2, 2),
        (4, 2, 1),
        (3, 3, 3),
        (4, 4, 3),
        (3, 5, 7),
    ):
        shape = tree.Template.of_widths(*widths)
        words = jnp.full((1, shape.nodes), 28, jnp.int32)
        block = tree.block(shape.chosen(words, words > 0), words[:, 0])
        leaves = int(np.prod(widths))
        for way in ("tree", "sequences"):
            reader = model if way == "tree" else Branches(model, leaves, shape.depth)
            step = jax.jit(
                lambda params, cache, block, reader=reader: (
                    reader.extend(params, cache, block).logits
                )
            )
            compiled = step.lower(params, cache, block).compile()
            memory = compiled.memory_analysis().temp_size_in_bytes
            read = 1 + shape.nodes if way == "tree" else leaves * (shape.depth + 1)
            rows.append({"nodes": shape.nodes, "leaves": leaves, "way": way,
                         "temporary_mb": memory / 1e6, "tokens_read": read})  # fmt: skip
            calls[len(rows) - 1] = functools.partial(compiled, params, cache, block)
    one = tree.block(tree.Template(((0,),)).chosen(words[:, :1], words[:, :1] > 0), words[:, 0])
    first = jax.tree.map(lambda x: x[:, :1], one)._replace(mask=one.mask[:, :1, :1])
    plain = jax.jit(lambda params, cache, block: model.extend(params, cache, block).logits)
    calls["plain"] = functools.partial(plain, params, cache, first)
    taken = timing.interleaved(calls, 7)
    for i, row in enumerate(rows):
        row |= {"ms": taken[i].median * 1e3, "steps": taken[i].median / taken["plain"].median}
    return rows


# The document.


def write(out: pathlib.Path) -> None:
    """docs/text_drafters.md from the parts that are there."""
    read = lambda name: json.loads((out / f"{name}.json").read_text())  # noqa: E731
    there = [n for n in ("copy", "rest", "lookahead", "verify") if (out / f"{n}.json").exists()]
    lines = ["# Drafting from text alone: sweeps", "", INTRO, "", MASKS, ""]
    for name in there:
        lines += [*SECTIONS[name](read(name)), ""]
    (DOCS / "text_drafters.md").write_text("\n".join(lines), encoding="utf-8")
    print(f"{time.strftime('%H:%M')} wrote {DOCS / 'text_drafters.md'}")


INTRO = f"""Written by `python scripts/sweep_text_drafters.py`. Target: SmolLM2-135M-Instruct in
float32, greedy, {STEPS} tokens at most; prompts: the reported half of HumanEval and of Spec-Bench's six
sub-tasks, ten of each. Tokens per round count the target's own token. Nothing was chosen on these prompts."""


MASKS = """## Masks

What the target reads in one step, drawn from the arrays that it is given (`python scripts/mask_pictures.py`):
two first words with the same three behind each (the example of SpecInfer and Medusa), the branches that
followed "the" in a text (Alibaba's Lookahead), and Lookahead decoding's window and guesses.

![The product of two words and three](img/product_mask.png)
![Branches of a trie](img/trie_mask.png)
![Window and guesses](img/lookahead_mask.png)"""


def _table(columns: list[str], rows: list[list]) -> list[str]:
    cell = lambda x: f"{x:.2f}" if isinstance(x, float) else str(x)  # noqa: E731
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows]


def _copy_section(rows: list[dict]) -> list[str]:
    every = [r for r in rows if r["task"] == "all"]
    comparison.sweep(
        [r | {"task": f"depth {r['depth']}"} for r in every if r["method"] in ("parallel", "hierarchical")],
        DOCS / "img" / "sweep_copy.png", "budget", "tokens_per_round", "method",
        ("node budget", "tokens per round"), bottom=1.0,
    )  # fmt: skip
    budgets = sorted({r["budget"] for r in every})
    lines = []
    for method in ("LLMA", "prompt lookup", "parallel", "hierarchical"):
        for depth in sorted({r["depth"] for r in every}):
            own = {
                r["budget"]: r["tokens_per_round"]
                for r in every
                if (r["method"], r["depth"]) == (method, depth)
            }
            span = method in ("LLMA", "prompt lookup")
            alone = next(iter(own.values())) if span else "–"
            lines.append(
                [method, depth, alone, *("–" if span else own.get(b, "–") for b in budgets)]
            )
    best = max(
        (r for r in every if r["method"] == "hierarchical"), key=lambda r: r["tokens_per_round"]
    )
    same = lambda r: (r["budget"], r["depth"]) == (best["budget"], best["depth"])  # noqa: E731
    tasks = [r for r in rows if r["method"] == "hierarchical" and same(r)]
    llma = {
        r["task"]: r["tokens_per_round"]
        for r in rows
        if r["method"] == "LLMA" and r["depth"] == best["depth"]
    }
    return [
        "## Node budget and depth", "",
        "Branch length (depth) and decoding length (budget) of Alibaba's Lookahead (2312.12728). A single",
        "span (LLMA, prompt lookup) has no budget beside its length. Parallel branches pay for every token",
        "of every branch, the hierarchical tree once for what they share, and so holds more of them.", "",
        *_table(["method", "depth", "one span", *(f"{b} nodes" for b in budgets)], lines), "",
        f"By task, hierarchical with {best['budget']} nodes and depth {best['depth']}, beside LLMA of that",
        "length:", "",
        *_table(["task", "hierarchical", "LLMA", "drafted per round"],
                [[r["task"], r["tokens_per_round"], llma[r["task"]], r["drafted_per_round"]]
                 for r in tasks]), "",
        "![Tokens per round over the node budget](img/sweep_copy.png)",
    ]  # fmt: skip


def _rest_section(rows: list[dict]) -> list[str]:
    every = [r for r in rows if r["task"] in ("all", "human_eval")]
    comparison.sweep(
        every, DOCS / "img" / "sweep_rest.png", "nodes", "tokens_per_round", "size",
        ("draft nodes", "tokens per round"), lambda size: f"{size:,} tokens", 1.0,
    )  # fmt: skip
    sizes, nodes = sorted({r["size"] for r in every}), sorted({r["nodes"] for r in every})
    found = {(r["task"], r["size"], r["nodes"]): r["tokens_per_round"] for r in every}
    lines = [
        [task, f"{s:,}", *(found[task, s, n] for n in nodes)]
        for task in ("all", "human_eval")
        for s in sizes
    ]
    return [
        "## Datastore size and draft nodes", "",
        "REST over prefixes of one store: Python files of installed packages and descriptions of Debian",
        "packages, without what repeats a prompt or an answer of the benchmarks.", "",
        *_table(["task", "store", *(f"{n} nodes" for n in nodes)], lines), "",
        "![Tokens per round over draft nodes](img/sweep_rest.png)",
    ]  # fmt: skip


def _lookahead_section(rows: list[dict]) -> list[str]:
    square = [r for r in rows if r["W"] == r["G"]]
    comparison.sweep(
        square, DOCS / "img" / "sweep_lookahead.png", "W", "tokens_per_round", "N",
        ("window W (G = W)", "tokens per round"), lambda n: f"N = {n}", 1.0,
    )  # fmt: skip
    every = [r for r in rows if r["task"] == "all"]
    return [
        "## W, N and G of Lookahead decoding", "",
        "Three prompts each of three tasks. Steps fall as the window grows; so many tokens a step are free",
        "on an accelerator only.",
        "", *_table(["W", "N", "G", "nodes", "tokens per round"],
                    [[r["W"], r["N"], r["G"], r["nodes"], r["tokens_per_round"]] for r in every]), "",
        "![Tokens per round over the window](img/sweep_lookahead.png)",
    ]  # fmt: skip


def _verify_section(rows: list[dict]) -> list[str]:
    comparison.sweep(
        [r | {"task": "SmolLM2-135M, two cores"} for r in rows], DOCS / "img" / "sweep_verify.png",
        "nodes", "steps", "way", ("tree nodes", "cost of verifying, in plain steps"),
    )  # fmt: skip
    pairs = {(r["nodes"], r["leaves"], r["way"]): r for r in rows}
    keys = sorted({key[:2] for key in pairs})
    lines = []
    for nodes, leaves in keys:
        one, other = pairs[nodes, leaves, "tree"], pairs[nodes, leaves, "sequences"]
        lines.append([nodes, leaves, one["tokens_read"], other["tokens_read"], one["steps"], other["steps"],
                      one["temporary_mb"], other["temporary_mb"]])  # fmt: skip
    return [
        "## Tree attention against a row for every branch", "",
        "One forward of the target behind a HumanEval prompt; cost in plain steps, temporary memory of",
        "the compiled step in MB. Sequences read a token again for every branch through it, and copy the",
        "cache for every branch.", "",
        *_table(["nodes", "branches", "tokens (tree)", "tokens (sequences)", "steps (tree)",
                 "steps (sequences)", "MB (tree)", "MB (sequences)"], lines), "",
        "![Cost over tree nodes](img/sweep_verify.png)",
    ]  # fmt: skip


SECTIONS = {
    "copy": _copy_section,
    "rest": _rest_section,
    "lookahead": _lookahead_section,
    "verify": _verify_section,
}


if __name__ == "__main__":
    main()
