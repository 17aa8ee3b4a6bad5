"""Exact laws by enumeration: the production ``walk`` over all drafts and acceptance outcomes.

`Mutant` verifiers do it wrong on purpose: a check that they pass is no check.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import stopping, tree
from specjax.decode import verify as rules
from specjax.decode.residual import row_of
from specjax.decode.verify import SpeculativeSampling

# Base cases: target p, draft q.
ONE_ATOM = ((0.6, 0.3, 0.1), (0.1, 0.3, 0.6))
TWO_ATOMS = ((0.4, 0.4, 0.2), (0.1, 0.2, 0.7))


def log(p):
    """float64 log-probabilities; log 0 is -inf."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64))


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A verifier for chains from two formulas on probabilities, each usually wrong.

    ``accept(p, q, x)`` is the probability that token x is accepted, ``after(p, q, x)`` the law
    of the token that replaces a refused x.
    """

    accept: Callable
    after: Callable

    lossless = False

    def walk(self, tree_, log_p, u):
        p, x = jnp.exp(log_p), tree_.tokens
        log_q = jnp.full_like(log_p[:, :-1], -jnp.inf) if tree_.log_q is None else tree_.log_q
        q = jnp.exp(log_q)
        accept = jnp.minimum(self.accept(p[:, :-1], q, x), 1.0)
        verdict = rules._walk_chain(tree_, jnp.log(accept), (u < accept) & tree_.judged)
        node = jnp.minimum(verdict.accepted, x.shape[1] - 1)[:, None, None]
        row = lambda y: jnp.take_along_axis(y, node, axis=1)  # noqa: E731
        law = self.after(row(p[:, :-1]), row(q), jnp.take_along_axis(x, node[:, 0], 1))
        refused = (verdict.tested.sum(1, dtype=jnp.int32) > verdict.accepted)[:, None]
        bonus = row_of(log_p, verdict.accepted)
        return verdict._replace(log_next=jnp.where(refused, jnp.log(law)[:, 0], bonus))


def at(y, x):
    """y at token x."""
    return jnp.take_along_axis(y, x[..., None], axis=-1)[..., 0]


def norm(y):
    return y / y.sum(-1, keepdims=True)


def ratio(p, q, x):
    return at(p, x) / at(q, x)


def residual(p, q, x):
    del x
    return norm(jnp.maximum(p - q, 0))


def one_hot(x, p):
    return jax.nn.one_hot(x, p.shape[-1], dtype=p.dtype)


RIGHT = Mutant(ratio, residual)
MUTANTS = {
    "accept always": Mutant(lambda p, q, x: jnp.ones(x.shape), lambda p, q, x: p),
    "from p after a rejection": Mutant(ratio, lambda p, q, x: p),
    "only the refused id subtracted": Mutant(
        ratio, lambda p, q, x: norm(jnp.maximum(p - q * one_hot(x, p), 0))
    ),
    "p over max p": Mutant(lambda p, q, x: at(p, x) / p.max(-1), residual),
    "swapped ratio": Mutant(lambda p, q, x: at(q, x) / at(p, x), residual),
    "equality, then p": Mutant(lambda p, q, x: at(p, x), lambda p, q, x: p),
    "argmax of the target": Mutant(
        lambda p, q, x: (p.argmax(-1).astype(x.dtype) == x).astype(p.dtype),
        lambda p, q, x: one_hot(p.argmax(-1), p),
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def _walk(verifier, tree_, log_p, u):
    return verifier.walk(tree_, log_p, u)


def outcomes(verifier, tree_, log_p):
    """All outcomes of judging each row's chain.

    Yields:
      (accepted ``[B]``, their probabilities ``[B]``, next-token laws ``[B, V]``), one for each
      number of leading acceptances; a number beyond the valid nodes has probability 0.
    """
    nodes = tree_.tokens.shape[1]
    just_under_one = np.nextafter(1.0, 0.0)
    for accepted in range(nodes + 1):
        u = np.where(np.arange(nodes) < accepted, 0.0, just_under_one)
        u = jnp.broadcast_to(jnp.asarray(u), tree_.tokens.shape)
        verdict = _walk(verifier, tree_, log_p, u)
        accept = np.exp(np.asarray(verdict.log_accept)) * np.asarray(tree_.judged & tree_.valid)
        refuse = 1 - accept[:, accepted] if accepted < nodes else 1.0
        weight = accept[:, :accepted].prod(1) * refuse
        weight = np.where(weight < 1e-15, 0.0, weight)
        got = np.asarray(verdict.accepted)
        assert ((got == accepted) | (weight == 0)).all(), "walk disagrees with its log_accept"
        yield got, weight, np.exp(np.asarray(verdict.log_next))


def block_outcomes(verifier, tree_, log_p):
    """`outcomes` for a rule that accepts up to the last of its independent successes."""
    nodes = tree_.tokens.shape[1]
    just_under_one = np.nextafter(1.0, 0.0)
    for accepted in range(nodes + 1):
        u = np.where(np.arange(nodes) == accepted - 1, 0.0, just_under_one)
        u = jnp.broadcast_to(jnp.asarray(u), tree_.tokens.shape)
        verdict = _walk(verifier, tree_, log_p, u)
        accept = np.exp(np.asarray(verdict.log_accept)) * np.asarray(tree_.judged & tree_.valid)
        weight = (1 - accept[:, accepted:]).prod(1)
        weight = weight * accept[:, accepted - 1] if accepted else weight
        weight = np.where(weight < 1e-15, 0.0, weight)
        got = np.asarray(verdict.accepted)
        assert ((got == accepted) | (weight == 0)).all(), "walk disagrees with its log_accept"
        yield got, weight, np.exp(np.asarray(verdict.log_next))


def one_token_law(verifier, p, q, draft=None):
    """(law of the first emitted token, probability of acceptance) for one draft from q.

    ``draft`` fixes the drafted token, which then was chosen deterministically.
    """
    p, q, size = np.asarray(p, np.float64), np.asarray(q, np.float64), len(p)
    drafts = range(size) if draft is None else [draft]
    tokens = jnp.asarray([[x] for x in drafts], jnp.int32)
    log_q = None if draft is not None else jnp.broadcast_to(log(q), (size, 1, size))
    chain = tree.chain(tokens, jnp.ones_like(tokens, bool), log_q)
    log_p = jnp.broadcast_to(log(p), (len(tokens), 2, size))
    chance = q if draft is None else np.ones(1)
    (_, refused, law), (_, taken, _) = outcomes(verifier, chain, log_p)
    out = (chance * refused) @ law
    np.add.at(out, np.asarray(tokens)[:, 0], chance * taken)
    return out, float(chance @ taken)


class SequenceLaw:
    """The law of whole outputs of a speculative decode, by enumeration.

    Laws are functions from the text so far (a tuple that begins with the start token 0) to
    log-probabilities. ``log_q`` None drafts the first maximum of ``draft`` deterministically.
    """

    def __init__(self, verifier, target, draft, gamma, length, eos_id=-1, sampled=True):
        self.verifier, self.target, self.draft = verifier, target, draft
        self.gamma, self.length, self.eos_id, self.sampled = gamma, length, eos_id, sampled
        self.known = {}

    def after(self, text):
        """{output: probability} of all that may follow ``text``."""
        if len(text) == self.length + 1 or text[-1] == self.eos_id and len(text) > 1:
            return {text[1:]: 1.0}
        if text not in self.known:
            self.known[text] = self._round(text)
        return self.known[text]

    def _drafts(self, text):
        """(drafted tokens ``[R, gamma]``, chance ``[R]``, log_q ``[R, gamma, V]``)."""
        size = len(self.draft(text))
        if not self.sampled:
            words = ()
            for _ in range(self.gamma):
                words += (int(np.argmax(self.draft(text + words))),)
            return np.asarray([words]), np.ones(1), None
        rows = list(itertools.product(range(size), repeat=self.gamma))
        log_q = np.asarray([[self.draft(text + r[:i]) for i in range(self.gamma)] for r in rows])
        chance = np.exp(np.take_along_axis(log_q, np.asarray(rows)[..., None], 2)[..., 0].sum(1))
        possible = chance > 0
        return np.asarray(rows), np.where(possible, chance, 0.0), log_q

    def _round(self, text):
        left = self.length + 1 - len(text)
        rows, chance, log_q = self._drafts(text)
        prefixes = [[text + tuple(r[:i]) for i in range(self.gamma + 1)] for r in rows.tolist()]
        log_p = jnp.asarray([[self.target(prefix) for prefix in row] for row in prefixes])
        tokens = jnp.asarray(rows, jnp.int32)
        log_q = None if log_q is None else jnp.asarray(log_q)
        chain = tree.chain(tokens, jnp.ones_like(tokens, bool), log_q)
        chain = tree.limit(chain, jnp.full(len(rows), left, jnp.int32))
        out = {}
        joint = isinstance(self.verifier, rules.BlockVerification)
        judge = block_outcomes if joint else outcomes
        for accepted, weight, law in judge(self.verifier, chain, log_p):
            for r in np.flatnonzero(chance * weight):
                self._branch(out, text, rows[r, : accepted[r]], chance[r] * weight[r], law[r], left)
        return out

    def _branch(self, out, text, path, weight, law, left):
        """Adds what follows one draft and one outcome of its judgement, for each next token."""
        block = np.asarray([[*path, token] for token in np.flatnonzero(law)], np.int32)
        count = np.full(len(block), block.shape[1], np.int32)
        live, limit = np.zeros_like(count), np.full_like(count, left)
        pad = ((0, len(law) - len(block)), (0, self.gamma + 1 - block.shape[1]))
        args = [np.pad(x, pad[: x.ndim]) for x in (block, count, limit, live)]
        kept = np.asarray(_cut(*args, self.eos_id).count)[: len(block)]
        for words, k, chance in zip(block, kept, law[law > 0], strict=True):
            for output, rest in self.after((*text, *words[:k].tolist())).items():
                out[output] = out.get(output, 0.0) + weight * chance * rest


_cut = jax.jit(stopping.cut, static_argnums=4)


def chain_rule(target, length, eos_id=-1):
    """{output: probability} of plain decoding: the product of conditional laws."""
    todo, out = {(0,): 1.0}, {}
    for _ in range(length):
        step = {}
        for text, chance in todo.items():
            for token, p in enumerate(np.exp(target(text))):
                ended = token == eos_id or len(text) == length
                where, key = (out, (*text[1:], token)) if ended else (step, (*text, token))
                where[key] = where.get(key, 0.0) + chance * p
        todo = step
    return out


def distance(law, other):
    """The largest difference of two laws' probabilities."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law | other)


PRODUCTION = SpeculativeSampling()
