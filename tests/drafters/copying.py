"""What the tests of drafters that copy from texts share."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.interfaces import Block, Params, Prefilled, Prompt, Text
from specjax.decode.sampling import Sampling
from specjax.decode.verify import SpeculativeSampling
from tests import toys

# Slots of a prompt.
PROMPT = 32


class Spoken(toys.Table):
    """A `Table` whose text begins with the prompt, as a decoder-only model's does."""

    def prefill(self, params, prompt, slots, *, taps=()):
        del taps
        batch, width = prompt.tokens.shape
        cache = super().prefill(params, prompt, slots + width).cache
        depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
        mask = jnp.broadcast_to(jnp.asarray(np.tri(width, dtype=bool)), (batch, width, width))
        read = self.extend(params, cache, Block(prompt.tokens, depth, mask))
        cache = self.commit(cache, read.open, depth, prompt.length - 1)
        text = Text(jnp.pad(prompt.tokens, ((0, 0), (0, slots))), prompt.length)
        return Prefilled(cache, text, {}, prompt)


def cycle(*words, size=toys.VOCAB):
    """Parameters of a `Table` that says these words one after the other, again and again."""
    logits = np.zeros((size, size), np.float32)
    for word, after in zip(words, [*words[1:], words[0]], strict=True):
        logits[word, after] = 10
    return {"logits": jnp.asarray(logits)}


def padded(rows, width):
    """Tokens ``[B, L]`` with noise behind the lengths: what lies there must not matter."""
    noise = np.random.default_rng(0).integers(0, 6, (len(rows), width)).astype(np.int32)
    for row, words in zip(noise, rows, strict=True):
        row[: len(words)] = words
    return jnp.asarray(noise), jnp.asarray([len(row) for row in rows], jnp.int32)


def proposed(drafter, texts, prompts=None, *, store=None, given=None, width=24):
    """The trees drafted behind ``texts`` (rows of words, without a start token).

    With ``prompts`` it is an encoder-decoder's, that is, a start token stands before each text; the first
    ``given`` words of each text were not emitted (None for all of them).
    """
    start, rows = 0 if prompts is None else 1, len(texts)
    # At least four rows and 24 slots, so that most tests of a drafter share one program.
    full = lambda x: [*x, *[x[-1]] * (4 - rows)]  # noqa: E731
    tokens, length = padded([[0] * start + list(row) for row in full(texts)], width)
    given = length if given is None else jnp.asarray(full(given), jnp.int32) + start
    first = None if prompts is None else jnp.ones_like(length)
    text = Text(tokens, length, first)
    prompt = Prompt(*padded(full(texts if prompts is None else prompts), PROMPT))
    tree = _propose(drafter, store, Prefilled((), text, {}, prompt), given)
    return jax.tree.map(lambda x: x[:rows], tree)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, store, prefilled, given):
    params, text = Params(None, store), prefilled.text
    state = drafter.init(params, prefilled, text.tokens.shape[1])
    first = jnp.zeros_like(text.length) if text.first is None else text.first
    text = text._replace(first=first, start=given)
    keys = toys.row_keys(jax.random.key(0), text.length.shape[0])
    return drafter.propose(params, state, text, Sampling().rows(keys.shape[0]), keys)[0]


def paths(tree, row=0):
    """All paths of a tree as tuples of tokens, by node; {} of no node."""
    tokens, parent, valid = (np.asarray(x)[row] for x in (tree.tokens, tree.parent, tree.valid))
    found = {}
    for i in np.flatnonzero(valid):
        assert parent[i] < i and (parent[i] < 0 or valid[parent[i]])
        found[i] = (*found.get(parent[i], ()), int(tokens[i]))
    return found


def says(tree, row=0):
    """The paths of a tree, as a set; no two nodes say the same."""
    found = list(paths(tree, row).values())
    assert len(found) == len(set(found))
    return set(found)


def prefixes(*sequences):
    """All prefixes of these sequences."""
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


# Laws: all outputs of a few tokens and their probabilities.


def one_round(tree, log_p, verifier=SpeculativeSampling()):
    """Yields (tokens on the path, law of the next one, probability) of a row's round."""
    nodes = tree.tokens.shape[1]
    taken = np.asarray(list(itertools.product([False, True], repeat=nodes)))
    u = jnp.asarray(np.where(taken, 0.0, np.nextafter(1.0, 0.0)))
    repeat = lambda x: jnp.repeat(x, len(u), axis=0)  # noqa: E731
    verdict = _walk(verifier, jax.tree.map(repeat, tree), repeat(log_p), u)
    accept, tested = np.exp(np.asarray(verdict.log_accept)), np.asarray(verdict.tested)
    seen = set()
    for i in range(len(u)):
        what = (tuple(tested[i]), tuple(taken[i] & tested[i]))
        if what in seen:
            continue
        seen.add(what)
        weight = np.where(tested[i], np.where(taken[i], accept[i], 1 - accept[i]), 1).prod()
        if weight > 1e-15:
            path = np.asarray(verdict.path)[i, : int(verdict.accepted[i])]
            yield tuple(np.asarray(tree.tokens)[0, path]), np.exp(verdict.log_next[i]), weight


@functools.partial(jax.jit, static_argnums=0)
def _walk(verifier, tree, log_p, u):
    return verifier.walk(tree, log_p, u)


def output_law(propose, log_table, text, length):
    """Law of the ``length`` tokens behind a text, speculatively: ``{tokens: probability}``.

    ``propose`` makes the tree behind a text; the target's law is the row of its last token.
    """
    if length == 0:
        return {(): 1.0}
    tree, law = propose(text), {}
    ends = [text, *[(*text, *path) for path in node_paths(tree)]]
    log_p = jnp.asarray(np.stack([log_table[end[-1]] for end in ends]))[None]
    for path, after, weight in one_round(tree, log_p):
        for word, p in enumerate(after):
            new = (*map(int, path), word)[:length]
            rest = output_law(propose, log_table, (*text, *new), length - len(new))
            for more, q in rest.items():
                whole = (*new, *more)
                law[whole] = law.get(whole, 0.0) + weight * float(p) * q
    return law


def node_paths(tree):
    """The path to each node of row 0; of an invalid one a word that is there."""
    found = paths(tree)
    return [found.get(i, (0,)) for i in range(tree.tokens.shape[1])]


def law_error(propose, log_table, text, length):
    """The largest distance of an output's probability from the target's own chain rule."""
    law = output_law(functools.cache(propose), log_table, text, length)
    words, p = range(log_table.shape[0]), np.exp(log_table)
    worst = 0.0
    for output in itertools.product(words, repeat=length):
        own = np.prod([p[a, b] for a, b in itertools.pairwise((text[-1], *output))])
        worst = max(worst, abs(law.get(output, 0.0) - own))
    assert abs(sum(law.values()) - 1) < 1e-12
    return worst


# Decodes.


def same_tokens_and_counts(one, many, row) -> None:
    """A row of a decode is what it is alone."""
    for name in ("tokens", "lengths", "finish_reason", "stats"):
        pairs = zip(*(jax.tree.leaves(getattr(x, name)) for x in (one, many)), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(np.asarray(a)[0], np.asarray(b)[row], rtol=1e-6)
