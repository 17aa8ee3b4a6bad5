"""Training on a mesh: the single device's losses and parameters, on any split."""

import dataclasses
import functools

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


@pytest.fixture(scope="module")
def one_device(data, tmp_path_factory):  # noqa: F811
    """The state after four steps on one device, by optimizer."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda name: train(data, folder / name, 4, optimizer=name))


@pytest.mark.parametrize(
    ("parts", "dims", "optimizer"), [(1, 1, "adam"), (4, 1, "adam"), (2, 2, "adafactor")]
)
def test_a_mesh_trains_what_one_device_does(
    data,  # noqa: F811
    one_device,
    tmp_path,
    parts,
    dims,
    optimizer,
):
    """Rows, heads and both dimensions of parameters split; resumed on one device half way."""
    place, alone = partitioner(parts, dims), one_device(optimizer)
    apart = train(data, tmp_path / "apart", 4, place, optimizer)
    close(alone, apart)
    weight = apart.params["decoder"]["layers_0"]["mlp"]["wo"]["weight"]
    wanted = {(1, 1): P(), (4, 1): P(None, "model"), (2, 2): P("data", "model")}[parts, dims]
    assert weight.sharding.spec == wanted
    train(data, tmp_path / "moved", 2, place, optimizer)
    moved = train(data, tmp_path / "moved", 4, optimizer=optimizer)
    close(alone, moved)
    where = {len(x.sharding.device_set) for x in jax.tree.leaves(moved.params)}
    assert where == {1}  # it left the mesh


def test_parameters_to_start_from_go_to_the_mesh(data, tmp_path):  # noqa: F811
    """Given as a tree, or by a function that is told where each of them belongs."""
    place, told = partitioner(4, 1), []
    given = jax.device_get(MODEL.init(jax.random.key(9)))
    recipe, none = seq2seq.Seq2Seq(MODEL), loop.Schedule(steps=0)

    def load(shardings):
        told.append(shardings)
        return jax.device_put(given, shardings)

    for name, source in (("tree", given), ("function", load)):
        folder = str(tmp_path / name)
        state = loop.train(
            recipe, data, folder, none, initial_params=source, partitioner=place
        )  # fmt: skip
        close(state, state._replace(params=given))
        weight = state.params["decoder"]["layers_0"]["mlp"]["wo"]["weight"]
        assert weight.sharding.spec == P(None, "model")
    assert jax.tree.structure(told[0]) == jax.tree.structure(given)


def test_another_run_s_folder_is_refused(data, tmp_path):  # noqa: F811
    """A finished run of other data, recipe or optimizer is not taken for this one's result."""
    train(data, tmp_path / "run", 2)
    with pytest.raises(
        ValueError, match="holds another run .*optimizer: 'adam' there, 'adafactor'"
    ):
        train(data, tmp_path / "run", 4, optimizer="adafactor")
    other = dataclasses.replace(data, seed=7)
    with pytest.raises(ValueError, match="holds another run .*data: "):
        train(other, tmp_path / "run", 4)
    train(data, tmp_path / "run", 3)  # longer is the same run
    assert (tmp_path / "run" / "config.gin").exists()
    with pytest.raises(ValueError, match="training runs are written to a local folder"):
        train(data, "gs://bucket/run", 3)


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


class Parted:
    """Three rows, read in parts; ``asked`` holds which."""

    batch = {"inputs": np.arange(6).reshape(3, 2), "weights": np.ones((3, 2), np.float32)}

    batch_size = 3

    def __init__(self):
        self.asked = []

    def part(self, position, rows):
        self.asked.append((position, rows.tolist()))
        return {name: x[rows] for name, x in self.batch.items()}


@pytest.mark.parametrize("source", [Parted(), [None, None, Parted.batch]], ids=["parts", "whole"])
def test_rows_that_fill_up_weigh_nothing(source):
    wide = placement.read(source, 2, partitioner(2, 1))
    assert wide["inputs"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert wide["weights"].tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert wide["inputs"].sharding.spec == P(("data",))
    assert Parted.batch["weights"].sum() == 6  # what was read is left as it was
    if isinstance(source, Parted):
        assert source.asked == [(2, [0, 1, 2, 2])]


def test_a_process_is_asked_for_the_rows_of_its_own_devices(monkeypatch):
    """The second of two processes: the others' rows are never read."""
    place, source, put = partitioner(2, 1), Parted(), []
    monkeypatch.setattr(placement.devices, "own_rows", lambda sharding, rows: np.arange(2, rows))
    monkeypatch.setattr(placement.devices, "put_own_rows", lambda *given: put.append(given))
    placement.read(source, 7, place)
    ((mine, _, rows),) = put
    assert source.asked == [(7, [2, 2])] and rows == 4
    assert mine["weights"].tolist() == [[1, 1], [0, 0]]


def test_a_target_that_the_mesh_does_not_divide_is_not_trained(data, tmp_path):  # noqa: F811
    recipe = seq2seq.Seq2Seq(toys.tiny_t5(num_heads=6))
    with pytest.raises(ValueError, match="4 model partitions do not divide the 6 attention heads"):
        loop.train(recipe, data, str(tmp_path / "run"), partitioner=partitioner(4, 1))
