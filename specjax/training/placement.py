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

    Raises:
      ValueError: the mesh's axis ``model`` does not divide the model's heads.
    """
    partitioner.check_heads(model)
    params, whole = partitioner.params(model), partitioner.replicated

    def beside(leaf, parameter, sharding):
        if isinstance(leaf, optax.MaskedNode):  # of a parameter that is not trained
            return leaf
        return sharding if leaf.shape == parameter.shape else whole

    moments = optax.tree_map_params(
        optimizer,
        beside,
        state.optimizer,
        state.params,
        params,
        transform_non_params=lambda _: whole,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    return state._replace(params=params, optimizer=moments, step=whole, key=whole)


def using(partitioner: Partitioner | None) -> contextlib.AbstractContextManager:
    """While it lasts, models see the mesh (`layers.rows_apart`)."""
    return contextlib.nullcontext() if partitioner is None else jax.set_mesh(partitioner.mesh)


def read(batches: Any, position: int, partitioner: Partitioner | None) -> dict:
    """The batch at a position, its rows over all devices.

    A process reads the rows of its own devices, where the batches can be read in parts
    (`specjax.training.loop.PartedBatches`); else all, and drops the others. Copies of the last row
    that weigh nothing fill the batch up to divide evenly.

    Args:
      batches: see `specjax.training.loop.Batches`.
      position: which batch.
      partitioner: None leaves the batch as it is.
    """
    if partitioner is None:
        return batches[position]
    parted = hasattr(batches, "part")
    batch = {} if parted else batches[position]
    rows = batches.batch_size if parted else len(batch["weights"])
    wide = rows + -rows % devices.row_shards(partitioner.mesh)
    own = devices.own_rows(partitioner.rows, wide)
    held = np.minimum(own, rows - 1)
    mine = (
        batches.part(position, held) if parted else {n: np.asarray(batch[n])[held] for n in batch}
    )
    weights = np.where((own < rows)[:, None], mine["weights"], np.float32(0))
    return devices.put_own_rows(mine | {"weights": weights}, partitioner.rows, wide)


def shapes(tree: PyTree, shardings: PyTree) -> PyTree:
    """Abstract arrays with their shardings, to restore into."""
    of = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return jax.tree.map(of, tree, shardings)
