"""What lossy acceptance changes: score, log-probability and tokens per step beside exact sampling.

    python -m specjax.main --run_mode=train --gin_file=configs/train/debian_medusa.gin
    python scripts/lossy_table.py --heads ~/.cache/specjax/runs/debian_medusa
    python scripts/lossy_table.py --page                     # writes docs/lossy.md too

The shipped target with heads of its own samples the report half of the held-out sample, by speculative
sampling and by rules that give its law up (`specjax.decode.lossy`). All rules see the same prompts, seeds and
trees. "log p" is the mean over emitted tokens of their log-probability under the target at the temperature
sampled at, in nats: exact sampling's is minus the target's entropy, and a lossy rule's lies beside it.
"""

import argparse
import pathlib

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specjax import generate
from specjax.bench import harness
from specjax.data.sources import Heldout
from specjax.decode import lossy, stats
from specjax.decode.sampling import Sampling
from specjax.decode.verify import LenientSampling, SpeculativeSampling
from specjax.drafters.eagle import EagleHead
from specjax.drafters.medusa import MedusaHeads
from specjax.infer import system
from specjax.models.medusa import Medusa

TARGET = "specjax/assets/debian/target.int8.safetensors"
TASKS = {"debian_ende": "bleu", "debian_synopsis": "rougeL"}
RULES = {
    "speculative sampling (exact)": SpeculativeSampling(),
    "typical, ε .09, δ .3": lossy.TypicalAcceptance(),
    "typical, ε .3, δ .3": lossy.TypicalAcceptance(epsilon=0.3),
    "top-k, k 2": lossy.TopKAcceptance(2),
    "lenient, l .5": LenientSampling(0.5),
}
TITLES = ("task", "T", "rule", "score", "log p", "tokens a step", "tokens")
PAGE = """# Lossy acceptance

Written by `python scripts/lossy_table.py --page`. The rules that accept what is good enough do not keep the
target's law (tests/decode shows that they fail the exact test which the lossless ones pass). What they change
on the shipped T5 pair's target is below: BLEU and ROUGE-L of the report half, the mean log-probability of the
emitted tokens under the target, and the tokens emitted a step. Greedy rows come out exactly as plain ones.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", default="~/.cache/specjax/runs/debian_medusa")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.7, 1.0])
    parser.add_argument("--sentences", type=int, default=96, help="of each task")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2, help="seeds")
    parser.add_argument("--input_length", type=int, default=64)
    parser.add_argument("--max_decode_len", type=int, default=64)
    parser.add_argument("--page", action="store_true", help="write docs/lossy.md")
    args = parser.parse_args()
    target = system.Checkpoint(TARGET)
    model, params = target.load(target=True)
    heads, draft_params = system.Heads(args.heads).of(model, params)
    kind = MedusaHeads if isinstance(heads, Medusa) else EagleHead
    drafter = kind(model=heads, paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
    vocabulary, rows = target.vocabulary(), []
    cells = [(t, x) for t in TASKS for x in args.temperatures]
    for task, temperature in track(cells, description="sampling"):
        examples = harness.halves(Heldout(task), vocabulary, args.input_length)["report"]
        work = harness.make_workload(
            task, "report", examples, args.sentences, args.input_length, args.batch
        )
        for rule, verifier in RULES.items():
            runs = [
                _sample(
                    model, params, drafter, draft_params, verifier, work, temperature, seed, args
                )
                for seed in range(args.repeats)
            ]
            rows.append(_row(task, temperature, rule, runs, vocabulary, work))
    table = Table(title=f"{kind.__name__}, {args.sentences} sentences a task, {args.repeats} seeds")
    for title in TITLES:
        table.add_column(title, justify="left" if title in ("task", "rule") else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if args.page:
        place = pathlib.Path(__file__).parents[1] / "docs" / "lossy.md"
        lines = [TITLES, ["---"] * len(TITLES), *rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        how = f"{kind.__name__} with a tree of {drafter.nodes} nodes, {args.sentences} sentences a task, "
        place.write_text(
            PAGE + how + f"{args.repeats} seeds, standard errors over seeds.\n\n{text}\n"
        )
        print(place)


def _sample(model, params, drafter, draft_params, verifier, work, temperature, seed, args):
    """Decoded batches without the rows that fill them up."""
    outs, first = [], 0
    for prompt, real in zip(work.prompts, work.real, strict=True):
        out = generate(
            model, params, prompt, drafter=drafter, draft_params=draft_params, verifier=verifier,
            sampling=Sampling(temperature), max_decode_len=args.max_decode_len,
            key=jax.random.key(seed), row_ids=first + np.arange(len(prompt.length), dtype=np.int32),
        )  # fmt: skip
        outs.append(jax.tree.map(lambda x, real=real: np.asarray(x[:real]), out))
        first += real
    return outs


def _row(task: str, temperature: float, rule: str, runs: list, vocabulary, work) -> list[str]:
    scores, log_ps = [], []
    for outs in runs:
        texts = [
            vocabulary.decode(x[:n]) for o in outs for x, n in zip(o.tokens, o.lengths, strict=True)
        ]
        scores.append(Heldout(task).score(work.examples, texts)[TASKS[task]])
        log_ps.append(sum(o.log_probs.sum() for o in outs) / sum(o.lengths.sum() for o in outs))
    counted = [o.stats for outs in runs for o in outs]
    joined = stats.Stats(*(np.concatenate(x) for x in zip(*counted, strict=True)))
    tokens = sum(int(o.lengths.sum()) for outs in runs for o in outs)
    efficiency = f"{stats.summary(joined)['block_efficiency']:.2f}"
    return [
        task,
        f"{temperature:g}",
        rule,
        _spread(scores, 1),
        _spread(log_ps, 2),
        efficiency,
        f"{tokens:,}",
    ]


def _spread(values: list[float], digits: int) -> str:
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{np.mean(values):.{digits}f} ± {error:.{digits}f}"


if __name__ == "__main__":
    main()
