"""What lossy acceptance changes: score, log-probability and tokens per step beside exact sampling.

    python -m specjax.main --run_mode=train --gin_file=configs/train/debian_medusa.gin
    python scripts/lossy_table.py --heads ~/.cache/specjax/runs/debian_medusa
    python scripts/lossy_table.py --page                     # writes docs/lossy.md too

The shipped target with heads of its own samples the report half of the held-out sample, by speculative
sampling and by rules that give its law up (`specjax.decode.lossy`), all with the same prompts and trees.
"log p" is the mean log-probability of an emitted token under the law that the target has there at the
temperature sampled at, in nats; exact sampling's is minus the mean entropy of those laws.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specjax import assets, generate
from specjax.bench import harness
from specjax.data.sources import Heldout
from specjax.data.vocabulary import Base
from specjax.decode import lossy, stats
from specjax.decode.loop import Decoded
from specjax.decode.sampling import Sampling
from specjax.decode.verify import SpeculativeSampling
from specjax.drafters.eagle import EagleHead
from specjax.drafters.medusa import MedusaHeads
from specjax.infer import system
from specjax.models.medusa import Medusa

TASKS = {"debian_ende": "bleu", "debian_synopsis": "rougeL"}
RULES = {
    "speculative sampling (exact)": SpeculativeSampling(),
    "typical, ε .09, δ .3": lossy.TypicalAcceptance(),
    "typical, ε .3, δ .3": lossy.TypicalAcceptance(epsilon=0.3),
    "top-k, k 2": lossy.TopKAcceptance(2),
}
TITLES = ("task", "T", "rule", "score", "log p", "tokens a step")
PAGE = """# Lossy acceptance

Written by `python scripts/lossy_table.py --page`. The rules that accept what is good enough do not keep the
target's law: they fail the exact test which the lossless ones pass (tests/decode/test_lossy.py, which also
shows that greedy rows come out as plain decoding's). What they change on the shipped T5 target is below: BLEU
and ROUGE-L of the report half, the mean log-probability of an emitted token under the target's law there, in
nats, and the tokens emitted a step. Too high a log-probability is as wrong as too low a one: a rule that
takes the likeliest tokens lowers the temperature in effect. These rules draw nothing: one seed says it all.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", default="~/.cache/specjax/runs/debian_medusa")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--sentences", type=int, default=96, help="of each task")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="seeds, at least 2")
    parser.add_argument("--input_length", type=int, default=128)
    parser.add_argument("--max_decode_len", type=int, default=64)
    parser.add_argument("--page", action="store_true", help="write docs/lossy.md")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("errors take at least 2 repeats")
    pair = assets.load_pair()
    heads, weights = system.Heads(args.heads).of(pair.target, pair.target_params)
    kind, rows = MedusaHeads if isinstance(heads, Medusa) else EagleHead, []
    drafter = kind(model=heads, paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
    cells = [(t, x) for t in TASKS for x in args.temperatures]
    for task, temperature in track(cells, description="sampling"):
        examples = harness.halves(Heldout(task), pair.vocabulary, args.input_length)["report"]
        work = harness.make_workload(
            task, "report", examples, args.sentences, args.input_length, args.batch
        )
        for rule, verifier in RULES.items():
            decode = functools.partial(
                generate, pair.target, pair.target_params, drafter=drafter, draft_params=weights,
                verifier=verifier, sampling=Sampling(temperature), max_decode_len=args.max_decode_len,
            )  # fmt: skip
            seeds = range(args.repeats if verifier.lossless else 1)  # the others draw nothing
            repeats = [sample(decode, work, seed) for seed in seeds]
            rows.append([task, f"{temperature:g}", rule, *figures(repeats, pair.vocabulary, work)])
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
        how = (
            f"{kind.__name__} ({pathlib.Path(args.heads).name}) with a tree of {drafter.nodes} nodes, "
            f"{args.sentences} sentences a task, {args.repeats} seeds where sampling is exact; ± is the "
            "standard error over seeds."
        )
        place.write_text(f"{PAGE}{how}\n\n{text}\n")
        print(place)


def sample(decode: Callable, work: harness.Workload, seed: int) -> list[Decoded]:
    """Decoded batches, without the rows that fill them up."""
    outs, first = [], 0
    for prompt, real in zip(work.prompts, work.real, strict=True):
        ids = first + jnp.arange(len(prompt.length), dtype=jnp.int32)
        out = decode(prompt, key=jax.random.key(seed), row_ids=ids)
        outs.append(jax.tree.map(lambda x, real=real: np.asarray(x)[:real], out))
        first += real
    return outs


def figures(repeats: list[list[Decoded]], vocabulary: Base, work: harness.Workload) -> list[str]:
    """Score, log-probability and tokens a step, with their errors over repeats."""
    scores, log_p, efficiency = [], [], []
    for outs in repeats:
        found = Heldout(work.task).score(work.examples, harness.texts(vocabulary, outs))
        scores.append(found[TASKS[work.task]])
        log_p.append(sum(o.log_probs.sum() for o in outs) / sum(o.lengths.sum() for o in outs))
        efficiency.append(stats.summary(stats.joined(o.stats for o in outs))["block_efficiency"])
    return [spread(scores, 1), spread(log_p, 2), spread(efficiency, 2)]


def spread(values: list[float], digits: int) -> str:
    """Mean and standard error; of one value only that."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {error:.{digits}f}"


if __name__ == "__main__":
    main()
