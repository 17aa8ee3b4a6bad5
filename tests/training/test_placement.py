"""Training on a mesh: the single device's losses and parameters, on any split."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from specjax.partitioning import mesh as meshes
from specjax.partitioning import rules
from specjax.partitioning.rules import Partitioner
from specjax.training import loop, placement, seq2seq
from tests import toys
from tests.training.test_loop import data  # noqa: F401

MODEL = toys.tiny_t5(num_heads=4, emb_dim=32, mlp_dim=64)


def partitioner(parts: int, dims: int) -> Partitioner:
    return Partitioner(meshes.make(parts), rules.standard(parameter_partitioning_dims=dims))


def train(batches, folder, steps, place=None, optimizer="adam"):
    recipe = seq2seq.Seq2Seq(MODEL, dropout_rate=0.1)
    schedule = loop.Schedule(peak=1e-2, warmup=2, steps=steps, decay=1)
    return loop.train(
        recipe, batches, str(folder), schedule, {"copy": batches}, checkpoint_period=2,
        optimizer=optimizer, partitioner=place,
    )  # fmt: skip


def close(a, b):
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("parts", "dims", "optimizer"), [(1, 1, "adam"), (4, 1, "adam"), (2, 2, "adafactor")]
)
def test_a_mesh_trains_what_one_device_does(data, tmp_path, parts, dims, optimizer):  # noqa: F811
    """Rows, heads and both dimensions of parameters split; resumed on one device half way."""
    place = partitioner(parts, dims)
    alone = train(data, tmp_path / "alone", 4, optimizer=optimizer)
    apart = train(data, tmp_path / "apart", 4, place, optimizer)
    close(alone, apart)
    weight = apart.params["decoder"]["layers_0"]["mlp"]["wo"]["weight"]
    wanted = {(1, 1): P(), (4, 1): P(None, "model"), (2, 2): P("data", "model")}[parts, dims]
    assert weight.sharding.spec == wanted
    train(data, tmp_path / "moved", 2, place, optimizer)
    close(alone, train(data, tmp_path / "moved", 4, optimizer=optimizer))


def test_moments_lie_beside_their_parameters():
    place = partitioner(4, 1)
    schedule = loop.Schedule()
    for name, optimizer in loop.OPTIMIZERS.items():
        update = optimizer(schedule)
        params = MODEL.abstract()
        state = loop.TrainState(params, jax.eval_shape(update.init, params), 0, 0)
        found = placement.state_shardings(place, MODEL, update, state)
        flat = jax.tree.leaves_with_path(found.optimizer)
        where = {s.spec for path, s in flat if "'wo'" in jax.tree_util.keystr(path)}
        assert P(None, "model") in where, name
        assert jax.tree.structure(found.optimizer) == jax.tree.structure(state.optimizer)


def test_rows_that_fill_up_weigh_nothing():
    batch = {"inputs": np.arange(6).reshape(3, 2), "weights": np.ones((3, 2), np.float32)}
    wide = placement.pad_rows(batch, 4)
    assert wide["inputs"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert wide["weights"].sum() == 6
    assert placement.pad_rows(batch, 3) is batch
