"""Cost of a matrix product against its rows, on a CPU: where `layers.linear` gets its thresholds.

    python scripts/bench_linear.py
    python scripts/bench_linear.py --outputs 512 --inputs 1024 --rows 1 8

Multiplies with many distinct weights in turn, so that none stays in the cache, inside a compiled
loop, as decoding does. Prints milliseconds per matrix (medians over interleaved repeats):

    dot       XLA's dot on weights [out, in]
    halves    the CPU form on weights [out, in]
    tiled     the CPU form on weights in tiles
    parts     a dot per tile and eighth of the inputs, summed
    linear    what `layers.linear` chooses on weights [out, in]
    linear/t  what it chooses on weights in tiles, and this over its own one-row cost
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax.bench import machine, timing
from specjax.models import layers

# name: (product, on tiles)
FORMS = {
    "dot": (functools.partial(layers._dot, dtype=jnp.float32), False),
    "halves": (functools.partial(layers._halved, dtype=jnp.float32), False),
    "tiled": (functools.partial(layers._tiled, dtype=jnp.float32), True),
    "parts": (functools.partial(layers._tiled_batch, dtype=jnp.float32, parts=8), True),
    "linear": (layers.linear, False),
    "linear/t": (layers.linear, True),
}


def measure(rows: int, layouts: dict[bool, list], args) -> dict[str, timing.Samples]:
    """Seconds per matrix of each form."""
    x = jax.random.normal(jax.random.key(rows), (rows, args.inputs), jnp.float32)
    passes, calls = jnp.int32(args.passes), {}
    for name, (product, tiled) in FORMS.items():
        weights = layouts[tiled]
        run, _ = timing.compiled(functools.partial(machine.stream, product), x, weights, passes)
        calls[name] = functools.partial(run, x, weights, passes)
    taken = timing.interleaved(calls, args.repeats)
    return {name: t / (args.passes * len(layouts[False])) for name, t in taken.items()}


def show(found: dict[int, dict[str, timing.Samples]], count: int, args) -> None:
    size = 4 * args.outputs * args.inputs
    table = Table(title=f"ms per matrix [{args.outputs}, {args.inputs}], {count} distinct ones")
    for title in ("rows", *FORMS, "GB/s", "over one row"):
        table.add_column(title, justify="right")
    one = next(iter(found.values()))["linear/t"].median
    for rows, forms in found.items():
        best = min(form.median for form in forms.values())
        cells = [
            f"[bold]{f.median * 1e3:.3f}[/bold]" if f.median == best else f"{f.median * 1e3:.3f}"
            for f in forms.values()
        ]
        chosen = forms["linear/t"].median
        table.add_row(f"{rows}", *cells, f"{size / chosen / 1e9:.1f}", f"{chosen / one:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32, 64])
    parser.add_argument(
        "--megabytes", type=int, default=80, help="of all weights: beyond the cache"
    )
    parser.add_argument("--passes", type=int, default=3, help="over all weights, per timed call")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    count = max(1, args.megabytes * 2**20 // (4 * args.outputs * args.inputs))
    weights = machine.distinct_weights(count, (args.outputs, args.inputs))
    layouts = {False: weights, True: [layers.in_tiles(w) for w in weights]}
    show({rows: measure(rows, layouts, args) for rows in sorted(args.rows)}, count, args)


if __name__ == "__main__":
    main()
