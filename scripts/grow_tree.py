"""Measures how often each guess of Medusa's heads is right on held-out text, and grows the best tree from it.

  python scripts/grow_tree.py --run=~/.cache/specjax/runs/debian_medusa --nodes 5 7 15 63

Prints accuracies by head and rank, what every size of tree lets expect (tokens per step: it pays while that
grows faster than v, the cost of verifying so many nodes), and the last tree as a gin binding for
configs/methods/medusa.gin. The text is what the run was evaluated on.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gin
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import checkpoints, config
from specjax.analysis import trees
from specjax.models.medusa import Medusa
from specjax.training import heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--run", required=True, help="folder of a training run of Medusa's heads")
    add("--nodes", type=int, nargs="+", default=[5, 7, 15, 31, 63], help="sizes of trees")
    add("--ranks", type=int, default=10, help="guesses of each head")
    add("--data", nargs="+", help="which of the run's validation sets; all by default")
    options = parser.parse_args()
    run = pathlib.Path(options.run).expanduser()
    try:
        model, params = checkpoints.load_any(run)
        if not isinstance(model, Medusa):
            raise ValueError(f"{run} holds a {type(model).__name__}, not Medusa's heads")
        sets = validation(run, options.data)
        batches = (data[i] for data in sets.values() for i in range(len(data)))
        found = heads.rank_accuracies(model, params, batches, options.ranks)
        grown = [(n, *trees.sparse(found, n)) for n in options.nodes]
    except ValueError as error:
        sys.exit(f"grow_tree: {error}")
    show(found, grown, list(sets))


def validation(run: pathlib.Path, wanted: list[str] | None) -> dict:
    """The run's validation sets by name.

    Raises:
      ValueError: it has none, or none of a name.
    """
    config.parse([str(run / "config.gin")])
    given = gin.query_parameter("loop.train.validation")
    names = list(given) if wanted is None else wanted
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"no validation set {', '.join(missing)}; there are {', '.join(given)}")
    return {name: given[name].scoped_configurable_fn() for name in names}


def show(found: np.ndarray, grown: list[tuple], sets: list[str]) -> None:
    console = Console()
    table = Table(title=f"how often a guess is right ({', '.join(sets)})")
    for name in ("head / guess", *(str(i + 1) for i in range(found.shape[1]))):
        table.add_column(name, justify="right")
    for i, row in enumerate(found):
        table.add_row(str(i + 1), *(f"{x:.2f}" for x in row))
    console.print(table)
    table = Table(title="trees")
    for name in ("nodes", "depth", "tokens per step expected"):
        table.add_column(name, justify="right")
    for nodes, tree, expected in grown:
        table.add_row(str(nodes), str(tree.depth), f"{expected:.2f}")
    console.print(table)
    print(f"PATHS = {list(grown[-1][1].paths)}")


if __name__ == "__main__":
    main()
