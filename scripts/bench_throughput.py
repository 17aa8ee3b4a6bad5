"""Tokens per second over a queue of prompts, plain and speculative, by batch size.

    python scripts/bench_throughput.py                     # the shipped pair, batch 1, 8 and 32
    python scripts/bench_throughput.py --gammas 1 3 --batches 8 --sentences 64

Rows that end are refilled from the queue, so that every batch stays full until the queue is empty.
All configurations of a batch size take turns; medians with quartiles, and each one's ratio to plain
decoding at the same batch size, prompts' reading included.
"""

import argparse
import functools

import jax
from rich.console import Console
from rich.table import Table

from specjax import assets
from specjax.bench import harness, timing
from specjax.data.sources import Heldout
from specjax.decode.interfaces import Params
from specjax.decode.loop import Decoder
from specjax.decode.refill import Refill, Request
from specjax.decode.sampling import Sampling
from specjax.drafters.small_model import SmallModel


def requests(task: str, vocabulary, length: int, count: int) -> list[Request]:
    """Held-out prompts of the half that nothing was chosen on."""
    found = harness.halves(Heldout(task), vocabulary, length)["report"][:count]
    return [Request(e.number, e.inputs) for e in found]


def decode(engine: Refill, params: Params, queue: list[Request], sampling: Sampling) -> list:
    return list(engine(params, queue, sampling, jax.random.key(0)))


def measure(pair: assets.Pair, args, batch: int, queue: list[Request]) -> tuple[dict, dict]:
    """(seconds by gamma, emitted tokens by gamma)."""
    calls, tokens = {}, {}
    for gamma in (0, *args.gammas):
        drafter = SmallModel(pair.draft, gamma) if gamma else None
        engine = Refill(
            Decoder(pair.target, args.max_decode_len, drafter), batch, args.input_length
        )
        params = Params(pair.target_params, pair.draft_params if gamma else None)
        calls[gamma] = functools.partial(decode, engine, params, queue, Sampling(args.temperature))
        tokens[gamma] = sum(int(out.lengths) for _, out in calls[gamma]())
    return timing.interleaved(calls, args.repeats), tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="debian_ende", choices=("debian_ende", "debian_synopsis"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--sentences", type=int, default=64, help="in the queue")
    parser.add_argument("--input_length", type=int, default=64)
    parser.add_argument("--max_decode_len", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pair = assets.load_pair()
    queue = requests(args.task, pair.vocabulary, args.input_length, args.sentences)
    table = Table(title=f"{args.task}, {len(queue)} prompts, T = {args.temperature:g}, with refill")
    for title in ("batch", "γ", "tokens/s", "over plain"):
        table.add_column(title, justify="right", no_wrap=True)
    for batch in args.batches:
        taken, tokens = measure(pair, args, batch, queue)
        for gamma, seconds in taken.items():
            rate = timing.Samples(tokens[gamma] / seconds.values)
            plain = timing.Samples(tokens[0] / taken[0].values)
            over = (rate / plain).text() if gamma else "1"
            table.add_row(f"{batch}", f"{gamma or 'plain'}", rate.text(0), over)
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
