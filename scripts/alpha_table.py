"""Table 3 of Leviathan et al. 2023 on the shipped pair: α of trivial drafts and of the draft, T = 0 and 1.

    python scripts/build_debian.py       # once: the n-gram tables are counted on the training targets
    python scripts/alpha_table.py

As in the paper, α is E[sum_x min(p, q)] over text that the target generates, teacher-forced; here on the
report half of the held-out sample. Tables are counted on the training split alone.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import assets, generate
from specjax.analysis import papers
from specjax.bench import alpha, harness
from specjax.data.sources import Heldout
from specjax.decode.sampling import Sampling
from specjax.drafters.ngram import Ngram, bigram_table, unigram_table
from specjax.training import batches

TASKS = {"debian_ende": "ende", "debian_synopsis": "synopsis"}
TEMPERATURES = (0.0, 1.0)
# The paper's rows that stand beside ours, by its target's name.
PAPER = {"debian_ende": "T5-XXL 11B EnDe", "debian_synopsis": "T5-XXL 11B CNNDM"}
DRAFTS = {"unigram": "Unigram", "bigram": "Bigram", "draft": "T5-small 77M"}


def drafts(pair: assets.Pair, path: pathlib.Path) -> dict[str, tuple]:
    """(draft, its parameters or table) by name."""
    rows, lengths = batches.padded(batches.load_pairs(path).targets)
    size = pair.target.vocab_size
    return {
        "unigram": (Ngram(order=1), jnp.asarray(unigram_table(rows, lengths, size))),
        "bigram": (Ngram(order=2), jnp.asarray(bigram_table(rows, lengths, size))),
        "draft": (pair.draft, pair.draft_params),
    }


def measure(pair: assets.Pair, found: dict, work: harness.Workload, args, temperature: float):
    """({draft: α}, tokens) on text that the target generates at this temperature."""
    sums = {name: [] for name in found}
    for number, (prompt, real) in enumerate(zip(work.prompts, work.real, strict=True)):
        batch = prompt.length.shape[0]
        out = generate(
            pair.target,
            pair.target_params,
            prompt,
            sampling=Sampling(temperature),
            max_decode_len=args.max_decode_len,
            key=jax.random.fold_in(jax.random.key(0), number),
        )
        law = Sampling(temperature).rows(batch)
        texts = (pair.target, pair.target_params), (prompt, out.tokens, out.lengths, law)
        for name, draft in found.items():
            sums_of = jax.device_get(alpha.alpha(*texts[0], *draft, *texts[1]))
            sums[name].append(alpha.Alpha(*(x[:real] for x in sums_of)))
    joined = {n: alpha.Alpha(*map(np.concatenate, zip(*s, strict=True))) for n, s in sums.items()}
    tokens = int(joined["draft"].positions.sum())
    return {name: value.value for name, value in joined.items()}, tokens


def published(task: str) -> dict[str, tuple[float, float]]:
    """α at T = 0 and T = 1 in the paper, by our name of the draft."""
    rows = papers.load("leviathan2022").table("Table 3")
    mine = [r for r in rows if r["Mp"] == PAPER[task]]
    values = {r["Mq"]: (r["alpha_T0"], r["alpha_T1"]) for r in mine}
    return {name: values[theirs] for name, theirs in DRAFTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", default="~/.cache/specjax/debian_v001")
    parser.add_argument("--sentences", type=int, default=128, help="of each task")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input_length", type=int, default=128)
    parser.add_argument("--max_decode_len", type=int, default=64)
    args = parser.parse_args()
    pair, table = assets.load_pair(), Table(title="α over text the target generates")
    for title in ("task", "draft", "T = 0", "T = 1", "paper T = 0", "paper T = 1", "tokens"):
        table.add_column(title, justify="left" if title in ("task", "draft") else "right")
    for task, corpus in TASKS.items():
        path = pathlib.Path(args.data_dir).expanduser() / "tokens" / f"{corpus}-train.npz"
        examples = harness.halves(Heldout(task), pair.vocabulary, args.input_length)["report"]
        work = harness.make_workload(
            task, "report", examples, args.sentences, args.input_length, args.batch
        )
        found = drafts(pair, path)
        ours = [measure(pair, found, work, args, t) for t in TEMPERATURES]
        theirs, tokens = published(task), "+".join(f"{n}" for _, n in ours)
        for name in DRAFTS:
            cells = [f"{values[name]:.3f}" for values, _ in ours]
            table.add_row(task, name, *cells, *(f"{x:.2f}" for x in theirs[name]), tokens)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
