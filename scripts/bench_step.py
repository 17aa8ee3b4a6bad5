"""A plain decoding step beside its memory-bandwidth bound, and blocks of several tokens beside it.

    python scripts/bench_step.py                        # T5 v1.1 small, random weights
    python scripts/bench_step.py --model debian_target  # the shipped target's sizes, random weights
    python scripts/bench_step.py --batch 8 --temperature 1

Runs `plain_round` and `speculative_round` (with a drafter that costs nothing) as decoding runs them:
many rounds in one compiled loop. Prints three bandwidth probes, the bytes a step reads, the bound
(bytes over the best probe), and milliseconds and ratios as medians with quartiles over interleaved
repeats.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax import config
from specjax.analysis import theory
from specjax.bench import harness, machine, timing
from specjax.bench.free_draft import FreeDraft
from specjax.decode import loop
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.loop import Decoder, State
from specjax.decode.sampling import Sampling
from specjax.drafters.small_model import SmallModel
from specjax.models import layers
from specjax.models.t5 import T5

# Speed-ups whose α is printed.
WANTED = (1.3, 1.7, 2.0)


def load_model(name: str, macro: str = "MODEL") -> T5:
    """The model of ``configs/models/<name>.gin``, or of a path."""
    config.parse([name if name.endswith(".gin") else f"configs/models/{name}.gin"])
    return config.macro(macro)


def prepare(decoder: Decoder, params: Params, args) -> tuple[State, Sampling]:
    """The state after the encoder has read random tokens."""
    shape, vocab = (args.batch, args.input_length), decoder.model.vocab_size
    tokens = jax.random.randint(jax.random.key(1), shape, 2, vocab, jnp.int32)
    prompt = Prompt(tokens, jnp.full(args.batch, args.input_length, jnp.int32))
    keys = jax.random.split(jax.random.key(2), args.batch)
    state = loop.jit_start(decoder, params, prompt, keys)
    return state, Sampling(args.temperature).rows(args.batch)


def measure(model: T5, args) -> dict:
    """Seconds per round by block length, the bytes of a step, and compile seconds."""
    weights = jax.jit(model.init)(jax.random.key(0))
    params = Params(model.tile(weights) if args.layout == "tiled" else weights, None)
    before = args.cached - args.rounds // 2
    # A block that random weights accept now and then must not end the row before the rounds do.
    limit = args.cached + args.rounds + 4 * max(args.blocks, default=1)
    calls, compile_seconds, size = {}, {}, None
    for tokens in (1, *args.blocks):
        drafter = FreeDraft(tokens - 1, tokens - 1, model.vocab_size) if tokens > 1 else None
        decoder = Decoder(model, limit, drafter, eos_id=-1)
        state, sampling = prepare(decoder, params, args)
        run, compile_seconds[tokens] = timing.compiled(
            harness.rounds, decoder, params, state, sampling, jnp.int32(1)
        )
        size = size or machine.bytes_per_step(params.target, state.cache)
        state = run(params, state, sampling, jnp.int32(before))
        calls[tokens] = functools.partial(run, params, state, sampling, jnp.int32(args.rounds))
    taken = timing.interleaved(calls, args.repeats)
    steps = {tokens: samples / args.rounds for tokens, samples in taken.items()}
    return {"steps": steps, "bytes": size, "compile_seconds": compile_seconds}


def show(name: str, found: dict, probes: dict[str, float], args) -> None:
    console, size = Console(), found["bytes"]
    bound = size.total / (max(probes.values()) * 1e9)
    console.print("bandwidth: " + ", ".join(f"{k} {v:.1f} GB/s" for k, v in probes.items()))
    console.print(
        f"a step reads {size.weights / 1e6:.1f} MB of weights and {size.kv / 1e6:.1f} MB of K/V; "
        f"bound {bound * 1e3:.2f} ms"
    )
    plain = found["steps"][1]
    table = Table(
        title=f"{name}, {args.layout} weights, batch {args.batch}, T = {args.temperature:g}"
    )
    for title in ("tokens", "ms", "over plain", "over bound", "compile s"):
        table.add_column(title, justify="right", no_wrap=True)
    for tokens, step in found["steps"].items():
        over = (step / plain).text(2) if tokens > 1 else "1"
        seconds = found["compile_seconds"][tokens]
        table.add_row(
            f"{tokens}", (step * 1e3).text(), over, f"{(step / bound).median:.2f}", f"{seconds:.1f}"
        )
    console.print(table)


def show_required(model: T5, draft: T5, args) -> None:
    """The α that each speed-up (without prefill) needs, by Theorem 3.8 with v, from c and v here."""
    weights = [jax.jit(m.init)(jax.random.key(i)) for i, m in enumerate((model, draft))]
    if args.layout == "tiled":
        weights = [m.tile(w) for m, w in zip((model, draft), weights, strict=True)]
    params = Params(weights[0], {"small model": weights[1]})
    tokens = jnp.ones((args.batch, args.input_length), jnp.int32)
    prompt = Prompt(tokens, jnp.full(args.batch, args.input_length, jnp.int32))
    methods = [harness.Method("plain")]
    methods += [
        harness.Method("small model", n - 1, SmallModel(draft, n - 1)) for n in args.blocks if n > 1
    ]
    costs = harness.Costs.measure(harness.Runner(model, args.cached), methods, params, prompt)
    for method, cost in costs.items():
        c, v = cost.c(method.gamma), cost.v
        needed = {w: theory.required_alpha(w, c, method.gamma, v) for w in WANTED}
        shown = ", ".join(f"{w}x {'–' if a is None else f'{a:.2f}'}" for w, a in needed.items())
        print(f"gamma {method.gamma}: c {c:.3f}, v {v:.2f}; alpha needed for {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="t5_1_1_small", help="a file of configs/models, or a path"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[2, 4, 6, 8], help="verify lengths"
    )
    parser.add_argument("--cached", type=int, default=64, help="tokens in the cache, on average")
    parser.add_argument("--input_length", type=int, default=64)
    own = "tiled" if layers.long_vectors() else "plain"
    help_layout = "of weights; by default what this CPU decodes with"
    parser.add_argument("--layout", choices=("tiled", "plain"), default=own, help=help_layout)
    parser.add_argument("--rounds", type=int, default=16, help="per timed call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft", help="a draft's file: prints c and the α that speed-ups need")
    args = parser.parse_args()
    layers.long_vectors = lambda: True  # so that tiles are made wherever they are asked for
    probes, model = machine.bandwidth_probes(), load_model(args.model)
    found = measure(model, args)
    show(args.model, found, probes, args)
    if args.draft:
        show_required(model, load_model(args.draft, "DRAFT"), args)


if __name__ == "__main__":
    main()
