"""Where a training run's state and batches lie: parameters by the rules of a mesh, rows over its devices."""

import contextlib
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from specjax.decode import devices
from specjax.partitioning.rules import Partitioner


def state_shardings(
    partitioner: Partitioner, model: Any, optimizer: optax.GradientTransformation, state: Any
) -> Any:
    """Shardings of a `TrainState`: the optimizer's moments lie beside their parameters.

    What has another shape than its parameter (Adafactor's rows and columns) is small, and whole on
    every device.

    Args:
      partitioner: mesh and rules.
      model: what is trained.
      optimizer: its optimizer.
      state: the state's shapes.

    Returns:
      The same tree of shardings.
    """
    params, whole = partitioner.params(model), partitioner.replicated

    def beside(leaf, parameter, sharding):
        return sharding if leaf.shape == parameter.shape else whole

    moments = optax.tree_map_params(
        optimizer,
        beside,
        state.optimizer,
        state.params,
        params,
        transform_non_params=lambda _: whole,
    )
    return state._replace(params=params, optimizer=moments, step=whole, key=whole)


def using(partitioner: Partitioner | None) -> contextlib.AbstractContextManager:
    """While it lasts, models see the mesh (`layers.rows_apart`)."""
    return contextlib.nullcontext() if partitioner is None else jax.set_mesh(partitioner.mesh)


def place(batch: dict, partitioner: Partitioner | None) -> dict:
    """A batch's rows over all devices; rows that weigh nothing fill it up to divide evenly."""
    if partitioner is None:
        return batch
    shards = devices.row_shards(partitioner.mesh)
    return devices.put(pad_rows(batch, shards), partitioner.rows)


def pad_rows(batch: dict[str, Any], multiple: int) -> dict[str, np.ndarray]:
    """Repeats the last row up to a multiple; ``weights`` of the copies are 0."""
    rows = len(batch["weights"])
    more = -rows % multiple
    if not more:
        return batch
    wide = {
        name: np.pad(np.asarray(x), [(0, more)] + [(0, 0)] * (x.ndim - 1), mode="edge")
        for name, x in batch.items()
    }
    wide["weights"][rows:] = 0
    return wide


def shapes(tree: PyTree, shardings: PyTree) -> PyTree:
    """Abstract arrays with their shardings, to restore into."""
    of = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return jax.tree.map(of, tree, shardings)
