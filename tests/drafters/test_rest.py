"""REST: what is looked up, what becomes the tree, and decoding with it."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax import Sampling, generate
from specjax.data import datastore
from specjax.decode import devices, loop, stopping
from specjax.decode.interfaces import Drafter, Params, Text
from specjax.drafters import rest
from specjax.drafters.rest import Rest, Store
from specjax.partitioning import mesh as meshes
from tests import toys


def store_of(*parts):
    """A store of parts, each a list of documents."""
    flat = [[i for row in part for i in (*row, -1)] for part in parts]
    size = max(map(len, flat))
    tokens = np.asarray([row + [-1] * (size - len(row)) for row in flat], np.int32)
    suffixes = np.stack([datastore.sort(part) for part in tokens])
    return Store(jnp.asarray(tokens), jnp.asarray(suffixes))


def text_of(*rows, first=0, width=12):
    """Texts; behind them garbage that also stands in stores."""
    tokens = [[*row, *[3] * (width - len(row))] for row in rows]
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    return Text(jnp.asarray(tokens, jnp.int32), lengths, jnp.full_like(lengths, first))


@jax.jit
def jit_spread(count):
    return rest.spread(count, 7)


def continuations(drafter, store, text):
    """Row by row, without what is not there."""
    found = jax.jit(drafter.continuations)(store, text)
    rows = [[[i for i in s if i >= 0] for s in row] for row in np.asarray(found).tolist()]
    return [[s for s in row if s] for row in rows]


def searched(drafter, parts, words):
    """`Rest.continuations` for one row, in Python: every place is looked at."""
    for size in range(drafter.max_match, drafter.min_match - 1, -1):
        if len(words) < size:
            continue
        tail, found = words[len(words) - size :], []
        for part in parts:
            ends = [
                row[i:] for row in part for i in range(size, len(row)) if row[i - size : i] == tail
            ]
            found += [end[: drafter.depth] for end in sorted(ends)]
        if found:
            most = min(len(found), drafter.retrieved)
            return [found[i * len(found) // most] for i in range(most)]
    return []


def beginnings(sequences):
    """How many sequences go through every beginning."""
    return collections.Counter(tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1))


# What is looked up.


@pytest.mark.parametrize("letters", [3, 9, 90_000])
@pytest.mark.parametrize("parts", [1, 3])
def test_search_is_a_search_of_every_place(letters, parts):
    """Random documents and texts, of which some end as documents do, and some know no token of them."""
    rng = np.random.default_rng(letters + parts)
    alphabet = rng.integers(2, letters + 2, size=9).tolist()  # G7: ids beyond 16 bits
    drafter = Rest(max_match=4, min_match=2, retrieved=5, depth=3, nodes=3)
    draw = lambda size: rng.choice(alphabet, size=size).tolist()  # noqa: E731
    for _ in range(3):
        given = [[draw(rng.integers(1, 15)) for _ in range(6)] for _ in range(parts)]
        rows = [draw(rng.integers(1, 12)) for _ in range(12)]
        rows += [given[0][-1][-5:], given[0][0][:5], given[-1][-1][-2:], [letters + 5] * 3]
        expected = [searched(drafter, given, row) for row in rows]
        assert continuations(drafter, store_of(*given), text_of(*rows)) == expected
    assert any(expected) and not all(expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([7, 8], [[9]]),  # the longest; the other document's end is nothing to draft
        ([5, 6], [[7, 8, 9]]),
        ([6, 7], [[8, 9]]),
        ([4, 7, 8], [[9]]),  # only the last two are known
        ([8, 9], []),  # a document's end
        ([9, 5], []),  # nothing goes across a separator
        ([2, 8], []),  # the store's end
        ([5], []),  # shorter than min_match
        ([30, 31], []),
    ],
)
def test_edges(words, expected):
    store = store_of([[5, 6, 7, 8, 9], [5, 1, 7, 8], [2, 8]])
    assert continuations(Rest(3, 2, depth=3), store, text_of(words)) == [expected]


def test_a_longer_end_without_continuation_leaves_the_word_to_a_shorter_one():
    """5 6 7 stands only at a document's end; 6 7 also elsewhere."""
    store = store_of([[5, 6, 7], [4, 6, 7, 8]])
    assert continuations(Rest(3, 2, depth=2), store, text_of([5, 6, 7])) == [[[8]]]


def test_start_tokens_and_garbage_are_not_looked_for():
    """G6: what stands before ``first`` or behind the length is no text."""
    store = store_of([[0, 5, 9, 9], [5, 3, 8, 8], [3, 3, 7]])
    assert continuations(Rest(2, 2, depth=1), store, text_of([0, 5], first=0)) == [[[9]]]
    assert continuations(Rest(2, 2, depth=1), store, text_of([0, 5], first=1)) == [[]]
    assert continuations(Rest(1, 1, depth=1), store, text_of([0, 5], first=1)) == [[[3], [9]]]


def test_occurrences_are_spread_evenly():
    counts = [0, 1, 6, 7, 8, 20, 2**31 - 1]
    rows = np.asarray(jit_spread(jnp.asarray(counts, jnp.int32))).tolist()
    for count, row in zip(counts, rows, strict=True):
        most = min(count, 7)
        assert row == [i * count // most for i in range(most)] + [-1] * (7 - most)


def test_common_continuations_keep_their_share():
    """The first five of the order would all begin with 2."""
    part = [[7, 8, 2 + (i >= 10) + (i >= 18), 9 + i] for i in range(20)]
    drafter = Rest(2, 2, retrieved=5, depth=1, nodes=3)
    assert continuations(drafter, store_of(part), text_of([7, 8])) == [[[2], [2], [2], [3], [3]]]


# The tree.


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, store, text):
    return drafter.propose(Params((), store), (), text, None, None)[0]


def nodes_of(tree, row=0):
    """The valid nodes' paths."""
    paths = {-1: ()}
    for i, (token, parent) in enumerate(zip(tree.tokens[row], tree.parent[row], strict=True)):
        if tree.valid[row, i]:
            paths[i] = (*paths[int(parent)], int(token))
    return [path for i, path in paths.items() if i >= 0]


def test_the_commonest_beginnings_are_drafted():
    """Section 3.2: nodes by how many occurrences go through them; a parent before its children."""
    part = [[7, 8, *row] for row in ([2, 3, 4], [2, 3, 5], [2, 6, 4], [9, 9, 9])]
    tree = propose(Rest(2, 2, depth=3, nodes=5), store_of(part), text_of([7, 8]))
    assert nodes_of(tree) == [(2,), (2, 3), (9,), (2, 6), (9, 9)]
    assert tree.log_q is None and (tree.q_row == -1).all() and tree.depth == 3


def test_the_budget_takes_the_heaviest():
    rng = np.random.default_rng(0)
    part = [[7, 8, *rng.integers(2, 5, size=rng.integers(1, 5)).tolist()] for _ in range(12)]
    tree = propose(Rest(2, 2, depth=4, nodes=9), store_of(part), text_of([7, 8]))
    weights = beginnings(s[2:] for s in part)
    drafted = nodes_of(tree)
    assert len(drafted) == 9 and len(set(drafted)) == 9 and set(drafted) <= set(weights)
    found = sorted((weights[path] for path in drafted), reverse=True)
    assert found == sorted(weights.values(), reverse=True)[:9]


def test_no_match_drafts_nothing():
    """G2, G3: no junk token, whatever the length of the text."""
    store = store_of([[7, 8, 9]])
    for words in ([4], [4, 5], [7], [8, 7]):
        assert not propose(Rest(2, 2, depth=2), store, text_of(words)).valid.any()


# Decoding.

DRAFTER = Rest(max_match=4, min_match=1, retrieved=8, depth=3, nodes=6)


def decode(params, ask, store, drafter=DRAFTER, **kwargs):
    return generate(
        toys.T5,
        params,
        ask,
        drafter=drafter,
        draft_params=store,
        max_decode_len=toys.STEPS,
        **kwargs,
    )


@pytest.fixture(scope="module")
def t5():
    """A T5, prompts of unequal lengths, its greedy output, and a store with half of that in it."""
    params, ask = toys.init(toys.T5, 5), toys.ask(5)
    plain = toys.decode(params, ask)
    rng = np.random.default_rng(0)
    rows = toys.emitted(plain)
    noise = [rng.integers(0, toys.VOCAB, size=20).tolist() for _ in range(10)]
    return params, ask, plain, store_of([rows[0], rows[2][4:], *noise])


def test_greedy_text_is_plain_decoding_s(t5):
    """Invariant 1, for four rows of unequal lengths and for each alone; G9: a row is its B = 1 result."""
    params, ask, plain, store = t5
    out = decode(params, ask, store)
    assert toys.differences(toys.T5, params, ask, plain, out) == []
    assert int(out.stats.accepted.sum()) > 0
    for i in range(toys.BATCH):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], ask)
        alone = decode(params, row, store)
        assert (
            toys.differences(
                toys.T5, params, row, jax.tree.map(lambda x, i=i: x[i : i + 1], plain), alone
            )
            == []
        )
        for name in ("rounds", "drafted", "accepted"):
            assert int(getattr(alone.stats, name)[0]) == int(getattr(out.stats, name)[i]), (i, name)


def test_sampled_text_does_not_depend_on_other_rows(t5):
    params, ask, _, store = t5
    options = dict(sampling=Sampling(1.0), key=jax.random.key(1))
    out = decode(params, ask, store, **options)
    last = jax.tree.map(lambda x: x[3:], ask)
    alone = decode(params, last, store, row_ids=jnp.asarray([3], jnp.int32), **options)
    assert toys.emitted(alone) == toys.emitted(out)[3:]


def test_a_store_that_knows_the_text_is_accepted_almost_whole():
    """One plain round to see the first token, then whole drafts; a row it does not know goes on plainly."""
    known, unknown = list(range(2, 17)), list(range(17, 31))
    out = generate(
        toys.Script(), toys.scripts(known, unknown), toys.script_prompt(0, 1),
        drafter=DRAFTER, draft_params=store_of([known, [30, 29]]), max_decode_len=13, eos_id=-1,
    )  # fmt: skip
    assert toys.emitted(out) == [known[:13], unknown[:13]]
    assert out.stats.rounds.tolist() == [4, 13]  # 1, then 4 a round
    assert out.stats.accepted.tolist() == [9, 0] and out.stats.drafted.tolist() == [9, 0]
    assert (out.finish_reason != stopping.ERROR).all()


def test_what_stands_behind_eos_is_never_drafted():
    """EOS may be; ids that were stored with EOS have nothing behind it."""
    ids = datastore.closed(np.asarray([5, 6, 1, 7, 8]), 1).tolist()
    tokens = np.asarray([ids], np.int32)
    store = Store(jnp.asarray(tokens), jnp.asarray(datastore.sort(tokens[0])[None]))
    assert continuations(DRAFTER, store, text_of([5])) == [[[6, 1]]]
    assert continuations(DRAFTER, store, text_of([6, 1])) == [[]]


# Parts on devices.


def test_a_split_store_drafts_the_same_on_a_mesh():
    """Rows over ``data``, parts over ``model``, as the whole store on one device."""
    rng = np.random.default_rng(1)
    parts = [[rng.integers(2, 6, size=9).tolist() for _ in range(4)] for _ in range(4)]
    store = store_of(*parts)
    mesh = meshes.make(2)
    placed = devices.put(store, NamedSharding(mesh, PartitionSpec("model")))
    assert placed.tokens.addressable_shards[0].data.shape[0] == 2
    params = {"logits": 3 * jax.random.normal(jax.random.key(0), (8, 8))}
    ask = toys.prompt(*[[2 + i % 4] for i in range(8)])
    outs = [
        generate(
            toys.Table(8), given, ask, drafter=DRAFTER, draft_params=draft, max_decode_len=9,
            eos_id=-1, **options,
        )
        for given, draft, options in (
            (params, store, {}),
            (devices.put(params, NamedSharding(mesh, PartitionSpec())), placed, {"mesh": mesh}),
        )
    ]  # fmt: skip
    one, many = outs
    assert toys.emitted(one) == toys.emitted(many) and int(one.stats.accepted.sum()) > 0
    for name in ("rounds", "drafted", "accepted"):
        np.testing.assert_array_equal(getattr(one.stats, name), getattr(many.stats, name))


def test_a_split_store_stays_where_it_is():
    """What devices exchange is counts and what was found: no memory the size of a part is asked for."""
    mesh, part = meshes.make(4), 100_003
    places = NamedSharding(mesh, PartitionSpec("model")), NamedSharding(mesh, PartitionSpec("data"))
    described = lambda shape, place: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)  # noqa: E731
    store = Store(*[described((4, part), places[0])] * 2)
    text = Text(described((2, 64), places[1]), *[described((2,), places[1])] * 2)
    rows = PartitionSpec("data")
    search = jax.shard_map(
        DRAFTER.continuations, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows,
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    used = jax.jit(search).lower(store, text).compile().memory_analysis()
    assert used.temp_size_in_bytes < part < used.argument_size_in_bytes < 9 * part


def test_parts_are_one_store_where_all_occurrences_are_read():
    """The same beginnings with the same weights, however the documents are split."""
    rng = np.random.default_rng(2)
    rows = [rng.integers(2, 5, size=7).tolist() for _ in range(12)]
    drafter = Rest(3, 1, retrieved=64, depth=2, nodes=30)
    text = text_of([2, 3], [4, 4], [3, 2, 2])
    sets = [
        [beginnings(row) for row in continuations(drafter, store, text)]
        for store in (store_of(rows), store_of(rows[:5], rows[5:]), store_of(*[[r] for r in rows]))
    ]
    assert sets[0] == sets[1] == sets[2] and any(sets[0])


# Refusals.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(min_match=0), "got 0 to 16"),
        (dict(max_match=3, min_match=4), "got 4 to 3"),
        (dict(max_match=31), "1 to 30 tokens"),
        (dict(retrieved=0), "retrieved must be at least 1"),
        (dict(depth=0), "depth must be at least 1"),
        (dict(nodes=9), "9 nodes are too few for a path of 10"),
    ],
)
def test_values_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Rest(**options)


def test_other_parameters_are_refused():
    prefilled = toys.Script().prefill(toys.scripts([5]), toys.script_prompt(0), 8)
    with pytest.raises(ValueError, match="must be a rest.Store"):
        Rest().init(Params((), jnp.zeros(3)), prefilled, 8)
    assert isinstance(Rest(), Drafter) and loop.Decoder(toys.T5, 3, Rest()).block == 11
