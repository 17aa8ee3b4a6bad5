"""The trie of prompt and outputs: what is retrieved in each mode, and who may know of whom."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate
from specjax.decode import stopping
from specjax.decode.interfaces import Drafter
from specjax.drafters import trie
from specjax.drafters.trie import Store, Trie
from tests import toys
from tests.drafters import copying
from tests.drafters.copying import Spoken, cycle, prefixes, proposed, says
from tests.models import decoders

SMALL = dict(depth=3, budget=8, outputs=3, places=200)


def store_of(*texts, capacity=32):
    """A store that has taken in these texts, all at once."""
    return trie.absorb(trie.empty(capacity), *copying.padded(texts, 16))


# The store.


def test_a_store_takes_texts_in_and_forgets_the_oldest():
    """A gap behind each text; rows of length 0 are none; one call or several are the same."""
    store = trie.empty(12)
    assert (store.tokens == -1).all() and store.tokens.dtype == jnp.int32
    once = trie.absorb(store, *copying.padded([[4, 5, 1], [], [0, 7]], 16))
    assert once.tokens.tolist() == [-1] * 5 + [4, 5, 1, -1, 0, 7, -1]
    again = trie.absorb(once, *copying.padded([[8, 9, 2, 3], [6], []], 16))
    assert again.tokens.tolist() == [1, -1, 0, 7, -1, 8, 9, 2, 3, -1, 6, -1]
    apart = trie.absorb(store, *copying.padded([[4, 5, 1], [], []], 16))
    apart = trie.absorb(apart, *copying.padded([[], [], [0, 7]], 16))
    assert apart.tokens.tolist() == once.tokens.tolist()
    long = trie.absorb(once, *copying.padded([[*range(2, 18)], [3], []], 16))
    assert long.tokens.tolist() == [*range(9, 18), -1, 3, -1]
    assert (store.tokens == -1).all()  # what was given is as it was


def test_ids_of_a_large_vocabulary_are_kept():
    """G7: 70,000 is 70,000."""
    tokens = jnp.asarray([[70_000, 250_111]], jnp.int32)
    store = trie.absorb(trie.empty(4), tokens, jnp.asarray([2], jnp.int32))
    assert store.tokens.tolist() == [-1, 70_000, 250_111, -1]


# What is retrieved.


def test_the_three_modes():
    """2312.12728, figure 3's point: what is shared is paid for once in a hierarchy, again and again in
    parallel branches."""
    store = store_of([9, 2, 3, 4], [9, 2, 3, 5], [9, 2, 3, 4], [9, 6, 7, 8])
    tree = proposed(Trie(depth=3, budget=8), [[9]], store=store)
    assert says(tree) == prefixes((2, 3, 4), (2, 3, 5), (6, 7, 8)) and not tree.chain
    tree = proposed(Trie(depth=3, budget=4), [[9]], store=store)
    assert says(tree) == prefixes((2, 3, 4)) | {(6,)}  # of equal frequencies the higher node
    tree = proposed(Trie("parallel", depth=3, budget=6), [[9]], store=store)
    assert says(tree) == prefixes((2, 3, 4), (6, 7, 8))  # of once each the newer branch comes first
    tree = proposed(Trie("parallel", depth=3, budget=8), [[9]], store=store)
    assert says(tree) == prefixes((2, 3, 4), (6, 7, 8), (2, 3))  # paid for: 3 + 3 + 2
    tree = proposed(Trie("single", depth=3), [[9]], store=store)
    assert tree.chain and tree.tokens.tolist() == [[2, 3, 4]] and tree.valid.all()


def test_the_prompt_weighs_more_until_the_weight_says_otherwise():
    """Score (1 - w) f_prompt + w f_output; w = 1e-4 is a tie breaker, 0 and 1 leave a branch out."""
    store = store_of([9, 2], [9, 2], [9, 2], [9, 3])
    texts, prompts = [[9]], [[9, 4, 9, 3, 1]]
    one = lambda weight: says(  # noqa: E731
        proposed(Trie("single", depth=1, budget=1, weight=weight), texts, prompts, store=store)
    )
    assert one(1e-4) == {(3,)} and one(0.9) == {(2,)}
    all_of = lambda weight: says(  # noqa: E731
        proposed(Trie(depth=1, budget=9, weight=weight), texts, prompts, store=store)
    )
    assert (all_of(0.0), all_of(0.5), all_of(1.0)) == (
        {(4,), (3,)},
        {(2,), (3,), (4,)},
        {(2,), (3,)},
    )


def test_part_of_the_budget_is_for_outputs():
    """Of two nodes the prompt would have both; one is kept for the most frequent of outputs."""
    store = store_of([9, 2], [9, 2], [9, 3])
    texts, prompts = [[9]], [[9, 4, 9, 5, 1]]
    tree = lambda outputs: says(  # noqa: E731
        proposed(Trie(depth=1, budget=2, outputs=outputs), texts, prompts, store=store)
    )
    assert tree(0) == {(4,), (5,)} and (2,) in tree(1) and tree(2) == {(2,), (3,)}


def test_a_longer_suffix_is_enough_if_it_has_as_many_nodes():
    """The longest of max_match tokens with depth - 1 nodes below it, or else the shortest."""
    store = store_of([8, 9, 2, 3], [7, 9, 4, 5, 6])
    tree = proposed(Trie(depth=3, budget=9), [[8, 9]], store=store)
    assert says(tree) == prefixes((2, 3))
    tree = proposed(Trie(depth=4, budget=9), [[8, 9]], store=store)
    assert says(tree) == prefixes((2, 3), (4, 5, 6))
    tree = proposed(Trie(depth=4, budget=9), [[6, 9]], store=store)
    assert says(tree) == prefixes((2, 3), (4, 5, 6))
    assert not proposed(Trie(depth=4, budget=9), [[6, 3]], store=store).valid.any()


def test_texts_end_at_eos_and_at_gaps():
    """G2, G3, G6: no branch joins two texts, nothing stands behind EOS, padding and start are nothing."""
    store = store_of([9, 2, 1], [5, 6], [9])
    drafter = Trie(depth=3, budget=6)
    assert says(proposed(drafter, [[9]], store=store)) == prefixes((2, 1))
    assert not proposed(drafter, [[6], [1], [31]], store=store).valid.any()
    tree = proposed(drafter, [[], [0], [11]], [[11, 12, 1]] * 3, store=trie.empty(32))
    assert tree.valid.sum(1).tolist() == [0, 0, 2]
    assert says(tree, 2) == prefixes((12, 1))


def test_of_too_many_places_the_newest_count():
    store = store_of([9, 2], [9, 2], [9, 3], [9, 4])
    tree = proposed(Trie(depth=1, budget=9, places=2), [[9]], store=store)
    assert says(tree) == {(3,), (4,)}


def explicit(drafter, query, sources):
    """{path: (prompt frequency, output frequency)} below the suffix the rule takes, from a real trie.

    ``sources`` are (text, index from which on a following token counts as output).
    """
    nodes = collections.defaultdict(lambda: collections.defaultdict(lambda: [0, 0]))
    for text, start in sources:
        for at in range(len(text) - 1):
            branch = text[at + 1 : at + 1 + drafter.depth]
            if drafter.eos_id in branch:
                branch = branch[: branch.index(drafter.eos_id) + 1]
            kind = int(at + 1 >= start)
            if (0.0, 1.0)[1 - kind] == drafter.weight:
                continue
            for n in range(1, min(drafter.max_match, at + 1) + 1):
                key = tuple(text[at + 1 - n : at + 1])
                for path in prefixes(branch):
                    nodes[key][path][kind] += 1
    found = {}
    for n in range(1, min(drafter.max_match, len(query)) + 1):
        key = tuple(query[-n:])
        if drafter.eos_id in key or key not in nodes:
            break
        if not found or len(nodes[key]) >= max(drafter.enough, 1):
            found = nodes[key]
    return dict(found)


def leaves(nodes):
    """Paths that no other one goes on from."""
    return [p for p in nodes if not any(q[: len(p)] == p and q != p for q in nodes)]


def check(drafter, tree, row, nodes):
    """A tree against the nodes of an explicit trie; of equal weights any may be taken."""
    found = says(tree, row)
    weigh = lambda p: (1 - drafter.weight) * nodes[p][0] + drafter.weight * nodes[p][1]  # noqa: E731
    top = lambda values, n: sorted(values, reverse=True)[:n]  # noqa: E731
    assert found <= set(nodes)
    if drafter.mode == "single":
        assert len(leaves(found)) == bool(nodes)
        path = max(found, key=len, default=())
        for n in range(len(path) + 1):
            children = [weigh(p) for p in nodes if len(p) == n + 1 and p[:n] == path[:n]]
            assert (weigh(path[: n + 1]) >= max(children)) if n < len(path) else not children
    elif drafter.mode == "parallel":
        whole = sorted(leaves(nodes), key=lambda p: -weigh(p))
        if sum(map(len, whole)) <= drafter.budget:
            assert found == prefixes(*whole)
        else:
            taken = [p for p in whole if p in found]
            least = min(weigh(p) for p in taken) if taken else 0
            assert sum(len(p) for p in whole if weigh(p) > least) <= drafter.budget
            assert all(p in found for p in whole if weigh(p) > least) and taken
    else:
        assert len(found) == min(len(nodes), drafter.budget)
        if len(nodes) > drafter.budget:
            kept = drafter.outputs if 0 < drafter.weight < 1 else 0
            outputs = [nodes[p][1] for p in nodes if nodes[p][1]]
            assert top([nodes[p][1] for p in found], min(kept, len(outputs))) == top(outputs, kept)
            rest = drafter.budget - kept
            np.testing.assert_allclose(
                top(map(weigh, found), rest), top(map(weigh, nodes), rest), rtol=1e-5
            )


@pytest.mark.parametrize(
    "drafter",
    [
        Trie(**SMALL), Trie(**SMALL | {"weight": 0.5, "outputs": 0, "max_match": 3}),
        Trie(**SMALL | {"weight": 1.0}), Trie("parallel", **SMALL), Trie("single", **SMALL | {"eos_id": 2}),
    ],
)  # fmt: skip
def test_random_texts_against_an_explicit_trie(drafter):
    """G6, G9: four letters, EOS among them, a store, prompts and texts; each row its own."""
    rng, rows = np.random.default_rng(1), 24
    draw = lambda low, high: rng.integers(0, 5, rng.integers(low, high)).tolist()  # noqa: E731
    texts, prompts = [draw(1, 20) for _ in range(rows)], [draw(1, 12) for _ in range(rows)]
    given = [int(rng.integers(0, len(text) + 1)) for text in texts]
    earlier = [draw(1, 16) for _ in range(6)]
    store, full = store_of(*earlier, capacity=100), 0
    for with_prompts in (prompts, None):
        tree = proposed(drafter, texts, with_prompts, store=store, given=given)
        for row, text in enumerate(texts):
            sources = [(t, 0) for t in earlier] + [(text, given[row])]
            if with_prompts:
                sources.append((prompts[row], len(prompts[row])))
            nodes = explicit(drafter, text, sources)
            check(drafter, tree, row, nodes)
            full += len(nodes) > drafter.budget
    assert full > 5


def test_nodes_are_deterministic():
    """B3, invariant 2: no q; the noise behind the lengths is nothing."""
    store, texts = store_of([9, 2, 3], [9, 4]), [[5, 9], [4, 9, 4]]
    for mode in trie.MODES:
        drafter = Trie(mode, depth=3, budget=8)
        tree = proposed(drafter, texts, store=store)
        assert tree.log_q is None and (tree.q_row == -1).all() and tree.valid.any()
        assert tree.tokens.shape == (2, drafter.nodes) and tree.depth == drafter.depth
        for a, b in zip(
            jax.tree.leaves(tree), jax.tree.leaves(proposed(drafter, texts, store=store, width=30)),
            strict=True,
        ):  # fmt: skip
            np.testing.assert_array_equal(a, b)
        assert isinstance(drafter, Drafter)


def test_values_that_cannot_be_are_refused():
    for bad, word in (
        ({"mode": "hier"}, "mode"), ({"weight": 1.5}, "weight"), ({"depth": 0}, "depth"),
        ({"budget": 5}, "branches of 12"), ({"outputs": -1}, "outputs"), ({"max_match": 0}, "max_match"),
        ({"places": 0}, "places"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            Trie(**bad)


# What is decoded.

DRAFTER = Trie(depth=4, budget=10, outputs=4, places=16)


def test_greedy_output_is_plain_decoding_s():
    """Invariants 1 and 5, G9, H1: T5, B = 4 of unequal lengths and B = 1, with a store and rows alone."""
    ties, accepted, store = [], 0, trie.empty(128)
    for seed in range(4):
        params, ask = toys.init(toys.T5, seed), toys.ask(seed)
        options = dict(drafter=DRAFTER, draft_params=store, max_decode_len=toys.STEPS)
        plain, spec = toys.decode(params, ask), generate(toys.T5, params, ask, **options)
        ties += toys.differences(toys.T5, params, ask, plain, spec)
        assert (spec.finish_reason != stopping.ERROR).all()
        accepted += int(spec.stats.accepted.sum())
        for row in range(toys.BATCH if seed == 3 else 0):
            alone = jax.tree.map(lambda x, row=row: x[row : row + 1], ask)
            ids = jnp.asarray([row], jnp.int32)
            one = generate(toys.T5, params, alone, row_ids=ids, **options)
            copying.same_tokens_and_counts(one, spec, row)
        store = trie.absorb(store, spec.tokens, spec.lengths)
    assert not ties and accepted > 30


def test_decoder_only_output_is_plain_decoding_s():
    """Invariants 1 and 5, G9: a Llama, four unequal prompts, and two of them alone; no store."""
    model = decoders.tiny_llama()
    params, ask = decoders.init(model, 1), toys.ask(1)
    plain = decoders.decode(model, params, ask)
    spec = generate(model, params, ask, drafter=DRAFTER, max_decode_len=16)
    assert toys.emitted(plain) == toys.emitted(spec)
    for row in (0, 3):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], ask)
        ids = jnp.asarray([row], jnp.int32)
        one = generate(model, params, alone, drafter=DRAFTER, max_decode_len=16, row_ids=ids)
        copying.same_tokens_and_counts(one, spec, row)


def test_requests_know_nothing_of_each_other_but_by_the_caller_s_hand():
    """G8, N10: B after A is B alone, tokens and counts; with A's store B takes fewer rounds."""
    script = [*range(5, 17)]
    ask, params = toys.script_prompt(0), toys.scripts(script)
    nothing = trie.empty(64)

    def decode(store):
        return generate(
            toys.Script(), params, ask, drafter=DRAFTER, draft_params=store, max_decode_len=12
        )

    first, second = decode(nothing), decode(nothing)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.stats.rounds[0] == 12 and first.stats.drafted[0] == 0
    warm = decode(trie.absorb(nothing, first.tokens, first.lengths))
    assert toys.emitted(warm) == [script] and (nothing.tokens == -1).all()
    assert warm.stats.rounds[0] == 4  # a plain round says 5, then 4 + 1 tokens twice, then the rest
    assert isinstance(nothing, Store)


@pytest.mark.parametrize("mode", trie.MODES)
def test_a_text_that_repeats_itself_is_accepted_almost_whole(mode):
    """Its own output branch, without a store; a tree, parallel branches, a chain."""
    drafter = Trie(mode, depth=5, budget=10, places=16)
    out = generate(Spoken(), cycle(7, 8, 9), toys.prompt([7]), drafter=drafter, max_decode_len=40)
    assert toys.emitted(out) == [([8, 9, 7] * 14)[:40]]
    assert out.stats.rounds[0] <= 12


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", trie.MODES)
def test_the_law_of_samples_is_the_target_s(mode):
    """B3, B18, C1, invariant 2: 27 outputs of three tokens, exactly."""
    table = np.random.default_rng(3).normal(size=(3, 3))
    table -= np.log(np.exp(table).sum(1, keepdims=True))
    drafter = Trie(mode, depth=2, budget=4, outputs=1, places=16, eos_id=-1)
    store = store_of([0, 1, 2, 2, 1], [1, 1, 0])
    propose = lambda text: proposed(drafter, [text], store=store, given=[2])  # noqa: E731
    text = (0, 2, 1, 0)
    assert propose(text).valid.sum() >= 2
    assert copying.law_error(propose, table, text, 3) < 1e-12
