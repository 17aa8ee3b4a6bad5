"""Meshes, rules, and decoding on eight virtual devices: the same tokens as on one."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from specjax import Sampling, generate, stream
from specjax.decode import api, devices, loop
from specjax.decode.interfaces import Params
from specjax.decode.refill import Refill, Request
from specjax.drafters.small_model import SmallModel
from specjax.partitioning import mesh as meshes
from specjax.partitioning import rules
from specjax.partitioning.rules import Partitioner
from tests import toys

# Meshes.


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_mesh_has_t5x_s_axes(parts):
    found = meshes.make(parts)
    assert dict(found.shape) == {"data": 8 // parts, "model": parts}
    assert devices.row_shards(found) == 8 // parts
    assert meshes.make(submesh=(1, parts, 1, 1)).shape == found.shape


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            dict(num_partitions=3),
            "3 model partitions do not divide the 8 devices; possible are 1, 2",
        ),
        (dict(num_partitions=0), "num_partitions must be at least 1, got 0"),
        (dict(num_partitions=2, submesh=(2, 1, 1, 1)), "not both"),
        (dict(submesh=(2, 2)), r"four positive numbers \(x, y, z, cores per chip\), got \(2, 2\)"),
    ],
)
def test_a_bad_mesh_is_one_clear_line(options, said):
    with pytest.raises(ValueError, match=said):
        meshes.make(**options)


def tpu(*coords, slice_index=0):
    """A described TPU core."""
    return types.SimpleNamespace(
        platform="tpu", coords=coords, core_on_chip=0, slice_index=slice_index, id=coords
    )


def test_a_submesh_is_a_box_of_neighbours():
    """2x1x2 boxes of a 2x2x2 slice: each model's chips differ along x and z only."""
    devices = [tpu(x, y, z) for z in range(2) for y in range(2) for x in range(2)]
    grid = meshes._by_submesh((2, 1, 2, 1), devices)
    assert grid.shape == (2, 4)
    for y, row in enumerate(grid):
        assert {d.coords for d in row} == {(x, y, z) for x in range(2) for z in range(2)}
    with pytest.raises(
        ValueError, match=r"\(1, 3, 1, 1\) does not divide the slice's \(2, 2, 2, 1"
    ):
        meshes._by_submesh((1, 3, 1, 1), devices)


# Rules.


def spec(axes, shape, parts=4, **options):
    return rules.spec(axes, shape, rules.standard(**options), meshes.make(parts))


def test_standard_rules_are_t5x_s():
    """T5X's table, 1-D and 2-D parameters, in the order of its rules."""
    assert spec(("mlp", "embed"), (64, 32)) == P("model")
    assert spec(("embed", "joined_kv"), (32, 64)) == P(None, "model")
    assert spec(("vocab", "embed"), (64, 32), parameter_partitioning_dims=2) == P("model", "data")
    assert spec(("batch", "length", "embed"), (8, 5, 32)) == P("data")
    assert spec(("mlp", "vocab"), (64, 64)) == P(None, "model")  # vocab's rule comes first
    for axes, where in (
        (("mlp", "embed"), P("model", "data")),
        (("embed", "mlp"), P("data", "model")),
    ):
        assert spec(axes, (64, 64), parameter_partitioning_dims=2) == where


def test_what_the_mesh_does_not_divide_stays_whole():
    assert spec(("heads", "relpos_buckets"), (6, 32)) == P()
    assert spec(("mlp", "embed"), (66, 32)) == P()


def test_rules_of_the_user_are_appended():
    given = dict(additional_rules=[("kv", "model"), ("mine", "data")])
    assert spec(("mine", "kv"), (4, 8), **given) == P("data")  # kv has a rule already: whole
    with pytest.raises(ValueError, match="no rule for the logical axis 'mine'"):
        spec(("mine",), (4,))
    with pytest.raises(ValueError, match="one of .*'replica'"):
        rules.standard(additional_rules=[("kv", "nowhere")])
    with pytest.raises(ValueError, match="in 1 or 2 dimensions"):
        rules.standard(parameter_partitioning_dims=3)


def test_a_draft_whose_heads_do_not_divide_stays_whole():
    """T5-small has six heads."""
    partitioner = Partitioner(meshes.make(4))
    small = toys.tiny_t5(num_heads=6)
    assert all(s.is_fully_replicated for s in jax.tree.leaves(partitioner.params(small)))
    split = partitioner.params(small, whole=False)
    assert split["decoder"]["layers_0"]["mlp"]["wo"]["weight"].spec == P(None, "model")
    large = toys.tiny_t5(num_heads=8)
    assert not all(s.is_fully_replicated for s in jax.tree.leaves(partitioner.params(large)))
    whole = jax.tree.leaves(partitioner.params(large, whole=True))
    assert all(s.is_fully_replicated for s in whole)


def test_a_target_s_heads_must_divide():
    partitioner = Partitioner(meshes.make(4))
    partitioner.check_heads(toys.tiny_t5(num_heads=8))
    said = "4 model partitions do not divide the 6 attention heads of the T5; of 8 devices possible are 1, 2$"
    with pytest.raises(ValueError, match=said):
        partitioner.check_heads(toys.tiny_t5(num_heads=6))


def test_rows_must_divide():
    partitioner = Partitioner(meshes.make(2))
    partitioner.check_rows(8)
    with pytest.raises(ValueError, match="6 rows do not divide over 4 groups .* multiple of 4"):
        partitioner.check_rows(6)


# Decoding.

SIZES = dict(num_heads=8, emb_dim=32, mlp_dim=64)
TARGET, DRAFT = toys.tiny_t5(**SIZES, num_decoder_layers=2), toys.tiny_t5(**SIZES)


def decode(dtype, temperature, mesh=None, whole=None):
    target, draft = (toys.tiny_t5(**vars(m.config) | {"dtype": dtype}) for m in (TARGET, DRAFT))
    params, draft_params = toys.init(target, 0), toys.init(draft, 0)
    ask = toys.ask(3, batch=8)
    if mesh is not None:
        place = Partitioner(mesh)
        params = jax.device_put(params, place.params(target))
        draft_params = jax.device_put(draft_params, place.params(draft, whole))
        ask = jax.device_put(ask, place.rows)
    per_row = jnp.asarray([0.0, temperature] * 4, jnp.float32)  # H5: temperatures of rows unlike
    return generate(
        target,
        params,
        ask,
        drafter=SmallModel(draft, 3),
        draft_params=draft_params,
        sampling=Sampling(per_row),
        max_decode_len=16,
        mesh=mesh,
    )


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_mesh_decodes_the_single_device_s_tokens(parts):
    """Float64: exactly, and all counts too (H5, E8, invariant 5)."""
    with jax.enable_x64(True):
        alone = decode("float64", 1.0)
        apart = decode("float64", 1.0, meshes.make(parts), whole=parts == 2 or None)
    assert apart.tokens.sharding.spec in (P("data"), P(("data",)), P())
    for name in ("tokens", "lengths", "finish_reason"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(apart, name))
    for name, count in alone.stats._asdict().items():
        np.testing.assert_allclose(count, getattr(apart.stats, name), rtol=1e-12, err_msg=name)


def streamed(mesh=None):
    """What `stream` yields, sampled in float64, and what it returns at its end."""
    target, draft = (toys.tiny_t5(**vars(m.config) | {"dtype": "float64"}) for m in (TARGET, DRAFT))
    params, draft_params = toys.init(target, 0), toys.init(draft, 0)
    if mesh is not None:
        place = Partitioner(mesh)
        params = jax.device_put(params, place.params(target))
        draft_params = jax.device_put(draft_params, place.params(draft))
    found = stream(
        target,
        params,
        toys.ask(3, batch=8),
        drafter=SmallModel(draft, 3),
        draft_params=draft_params,
        sampling=Sampling(jnp.asarray([0.0, 1.0] * 4, jnp.float32)),
        max_decode_len=16,
        mesh=mesh,
    )
    pieces = []
    while True:
        try:
            pieces.append(next(found))
        except StopIteration as end:
            return pieces, end.value


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_a_stream_on_a_mesh_yields_the_single_device_s_tokens(parts):
    """Piece by piece, and at the end as `generate` returns them."""
    with jax.enable_x64(True):
        (alone, last), (apart, end) = streamed(), streamed(meshes.make(parts))
    assert len(alone) == len(apart) > 1
    for a, b in zip(alone, apart, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    np.testing.assert_array_equal(last.tokens, end.tokens)


def test_a_streamed_round_needs_nothing_of_other_rows():
    """Each device works on its own row alone: no data are exchanged, and caches stay apart."""
    mesh = meshes.make(1)
    place = Partitioner(mesh)
    both = Params(*(jax.device_put(toys.init(m, 0), place.params(m)) for m in (TARGET, DRAFT)))
    decoder = loop.Decoder(TARGET, 16, SmallModel(DRAFT, 3), mesh=mesh)
    ids = jnp.arange(8, dtype=jnp.int32)
    keys, law = loop.row_keys(jax.random.key(0), ids), Sampling().rows(8)
    state = loop.jit_start(decoder, both, toys.ask(3, batch=8), keys)
    round_ = api.jit_round.lower(decoder, both, state, law).compile()
    assert re.findall("all-reduce|all-gather|all-to-all|collective", round_.as_text()) == []
    state, piece = api.jit_round(decoder, both, state, law)
    for x in jax.tree.leaves((state.cache.kv, state.drafter.cache.kv, piece)):
        assert x.sharding.spec[0] in ("data", ("data",)), x.sharding


def test_caches_are_split_by_rows_and_heads():
    """None lies whole on a device, which nothing in an empty cache would forbid."""
    mesh = meshes.make(4)
    place = Partitioner(mesh)
    both = Params(*(jax.device_put(toys.init(m, 0), place.params(m)) for m in (TARGET, DRAFT)))
    decoder = loop.Decoder(TARGET, 16, SmallModel(DRAFT, 3), mesh=mesh)
    keys = loop.row_keys(jax.random.key(0), jnp.arange(8, dtype=jnp.int32))
    state = loop.jit_start(decoder, both, toys.ask(3, batch=8), keys)
    for cache in (state.cache, state.drafter.cache):
        for x in jax.tree.leaves((cache.kv, cache.cross)):
            assert x.sharding.spec[:2] == ("data", "model"), x.sharding


@pytest.mark.parametrize("parts", [2, 8])
def test_in_float32_greedy_text_differs_by_near_ties_at_most(parts):
    """Sums over split heads and vocabularies round otherwise (invariant 1)."""
    params, ask = toys.init(TARGET, 1), toys.ask(4, batch=8)
    place = Partitioner(meshes.make(parts))
    options = dict(drafter=SmallModel(DRAFT, 3), max_decode_len=16)
    draft = toys.init(DRAFT, 1)
    alone = generate(TARGET, params, ask, draft_params=draft, **options)
    apart = generate(
        TARGET,
        jax.device_put(params, place.params(TARGET)),
        ask,
        draft_params=jax.device_put(draft, place.params(DRAFT)),
        mesh=place.mesh,
        **options,
    )
    toys.differences(TARGET, params, ask, alone, apart)


def test_a_queue_is_decoded_on_a_mesh_as_on_one_device():
    """Rows are refilled in every group of devices; 11 prompts in 8 rows, sampled."""
    mesh = meshes.make(2)
    place, key = Partitioner(mesh), jax.random.key(5)
    both = Params(toys.init(TARGET, 0), toys.init(DRAFT, 0))
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, toys.VOCAB, size=n % 5 + 1).astype(np.int32) for n in range(11)]
    requests = [Request(i, text) for i, text in enumerate(texts)]

    def decode(mesh, params):
        decoder = loop.Decoder(TARGET, 12, SmallModel(DRAFT, 3), eos_id=1, mesh=mesh)
        engine = Refill(decoder, 8, 5)
        found = engine(params, requests, Sampling(1.0), key)
        return {number: out.tokens[: out.lengths].tolist() for number, out in found}

    split = Params(
        jax.device_put(both.target, place.params(TARGET)),
        jax.device_put(both.draft, place.params(DRAFT)),
    )
    assert decode(mesh, split) == decode(None, both)
    with pytest.raises(ValueError, match="6 rows do not divide over the mesh's 4 groups"):
        Refill(loop.Decoder(TARGET, 12, mesh=mesh), 6, 5)


def test_rows_that_do_not_divide_over_a_mesh_are_one_line():
    params = toys.init(TARGET, 0)
    with pytest.raises(ValueError, match="3 rows do not divide over the mesh's 8 groups"):
        generate(TARGET, params, toys.ask(0, batch=3), max_decode_len=4, mesh=meshes.make(1))
