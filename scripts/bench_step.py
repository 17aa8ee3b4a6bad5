"""A plain decoding step beside its memory-bandwidth bound, and blocks of several tokens beside it.

    python scripts/bench_step.py                        # T5 v1.1 small, random weights
    python scripts/bench_step.py --model debian_target  # the shipped target's sizes, random weights
    python scripts/bench_step.py --model smollm2-135m   # real weights, by name or from any checkpoint
    python scripts/bench_step.py --layout tiled plain   # both layouts of weights, interleaved
    python scripts/bench_step.py --batch 8 --temperature 1

Runs `plain_round` and `speculative_round` (with a drafter that costs nothing) as decoding runs them:
many rounds in one compiled loop. Prints three bandwidth probes, the bytes a step reads, the bound
(bytes over the best probe), and milliseconds and ratios as medians with quartiles over interleaved
repeats.
"""

import argparse
import functools
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table

from specjax import checkpoints, config, pretrained
from specjax.analysis import theory
from specjax.bench import harness, machine, timing
from specjax.bench.free_draft import FreeDraft
from specjax.decode import loop
from specjax.decode.interfaces import Model, Params, Prompt
from specjax.decode.loop import Decoder, State
from specjax.decode.sampling import Sampling
from specjax.drafters.small_model import SmallModel
from specjax.models import layers

# Speed-ups whose α is printed.
WANTED = (1.3, 1.7, 2.0)


def load_model(name: str, macro: str = "MODEL") -> tuple[Model, PyTree]:
    """A model of ``configs/models`` or of a gin file's path, with random weights; or a checkpoint."""
    file = name if name.endswith(".gin") else f"configs/models/{name}.gin"
    if not name.endswith(".gin") and not pathlib.Path(file).exists():
        model = pretrained.described(pretrained.locate(name), "float32")
        return model, checkpoints.load_any(pretrained.locate(name), model, "float32")[1]
    config.parse([file])
    model = config.macro(macro)
    return model, jax.jit(model.init)(jax.random.key(0))


def prepare(decoder: Decoder, params: Params, args) -> tuple[State, Sampling]:
    """The state after the encoder has read random tokens."""
    shape, vocab = (args.batch, args.input_length), decoder.model.vocab_size
    tokens = jax.random.randint(jax.random.key(1), shape, 2, vocab, jnp.int32)
    prompt = Prompt(tokens, jnp.full(args.batch, args.input_length, jnp.int32))
    keys = jax.random.split(jax.random.key(2), args.batch)
    state = loop.jit_start(decoder, params, prompt, keys)
    return state, Sampling(args.temperature).rows(args.batch)


def laid_out(model: Model, weights: PyTree, layout: str) -> PyTree:
    return model.tile(weights) if layout == "tiled" else weights


def measure(model: Model, weights: PyTree, args) -> dict:
    """Seconds per round by layout and block length, the bytes of a step, and compile seconds."""
    before = args.cached - args.rounds // 2
    # A block that random weights accept now and then must not end the row before the rounds do.
    limit = args.cached + args.rounds + 4 * max(args.blocks, default=1)
    calls, compile_seconds, size = {}, {}, None
    held = {layout: Params(laid_out(model, weights, layout), None) for layout in args.layout}
    for layout, tokens in itertools.product(args.layout, (1, *args.blocks)):
        params, which = held[layout], (layout, tokens)
        drafter = FreeDraft(tokens - 1, tokens - 1, model.vocab_size) if tokens > 1 else None
        decoder = Decoder(model, limit, drafter, eos_id=-1)
        state, sampling = prepare(decoder, params, args)
        run, compile_seconds[which] = timing.compiled(
            harness.rounds, decoder, params, state, sampling, jnp.int32(1)
        )
        size = size or machine.bytes_per_step(params.target, state.cache)
        state = run(params, state, sampling, jnp.int32(before))
        calls[which] = functools.partial(run, params, state, sampling, jnp.int32(args.rounds))
    taken = timing.interleaved(calls, args.repeats)
    steps = {which: samples / args.rounds for which, samples in taken.items()}
    return {"steps": steps, "bytes": size, "compile_seconds": compile_seconds}


def show(name: str, found: dict, probes: dict[str, float], args) -> None:
    console, size = Console(width=None if sys.stdout.isatty() else 110), found["bytes"]
    bound = size.total / (max(probes.values()) * 1e9)
    console.print("bandwidth: " + ", ".join(f"{k} {v:.1f} GB/s" for k, v in probes.items()))
    console.print(
        f"a step reads {size.weights / 1e6:.1f} MB of weights and {size.kv / 1e6:.1f} MB of K/V; "
        f"bound {bound * 1e3:.2f} ms"
    )
    table = Table(title=f"{name}, batch {args.batch}, T = {args.temperature:g}")
    for title in ("weights", "tokens", "ms", "over plain", "over bound", "compile s"):
        table.add_column(title, justify="right", no_wrap=True)
    for (layout, tokens), step in found["steps"].items():
        over = (step / found["steps"][layout, 1]).text(2) if tokens > 1 else "1"
        seconds = found["compile_seconds"][layout, tokens]
        ms, of_bound = (step * 1e3).text(), f"{(step / bound).median:.2f}"
        table.add_row(layout, f"{tokens}", ms, over, of_bound, f"{seconds:.1f}")
    console.print(table)


def show_required(target: tuple[Model, PyTree], draft: tuple[Model, PyTree], args) -> None:
    """The α that each speed-up (without prefill) needs, by Theorem 3.8 with v, from c and v here."""
    model, draft_model = target[0], draft[0]
    weights = [laid_out(*pair, args.layout[0]) for pair in (target, draft)]
    params = Params(weights[0], {"small model": weights[1]})
    tokens = jnp.ones((args.batch, args.input_length), jnp.int32)
    prompt = Prompt(tokens, jnp.full(args.batch, args.input_length, jnp.int32))
    methods = [harness.Method("plain")]
    methods += [
        harness.Method("small model", n - 1, SmallModel(draft_model, n - 1))
        for n in args.blocks
        if n > 1
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
    help_model = "a file of configs/models, a gin file's path, or a checkpoint"
    parser.add_argument("--model", default="t5_1_1_small", help=help_model)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[2, 4, 6, 8], help="verify lengths"
    )
    parser.add_argument("--cached", type=int, default=64, help="tokens in the cache, on average")
    parser.add_argument("--input_length", type=int, default=64)
    own = "tiled" if layers.long_vectors() else "plain"
    help_layout = "of weights, or both; by default what this CPU decodes with"
    parser.add_argument(
        "--layout", choices=("tiled", "plain"), nargs="+", default=[own], help=help_layout
    )
    parser.add_argument("--rounds", type=int, default=16, help="per timed call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft", help="a draft's file: prints c and the α that speed-ups need")
    args = parser.parse_args()
    layers.long_vectors = lambda: True  # so that tiles are made wherever they are asked for
    probes, target = machine.bandwidth_probes(), load_model(args.model)
    show(args.model, measure(*target, args), probes, args)
    if args.draft:
        show_required(target, load_model(args.draft, "DRAFT"), args)


if __name__ == "__main__":
    main()
