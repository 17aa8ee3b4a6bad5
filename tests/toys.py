"""Toy models and drivers for tests: small enough to enumerate, strict enough to notice a bug.

`Table` and `Script` keep the tokens themselves as keys and their positions as values. What a block
token may read is put in order by position; where a position is missing or there twice (a hole in a
cache, a wrong mask, a wrong depth) the logits are NaN, and the decode ends in `stopping.ERROR`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import generate
from specjax.decode import loop, stopping
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Extended, Open, Params, Prefilled, Prompt
from specjax.decode.sampling import Sampling
from specjax.drafters.small_model import SmallModel
from specjax.models import cache as caches
from specjax.models import prefix, t5
from specjax.models.cache import Cache

VOCAB, EOS, OFF_PATH, SCRIPT_LENGTH = 32, 1, 31, 16
# Words of a script that are no tokens: all logits NaN, all masked.
NAN, MASKED = -2, -3


@dataclasses.dataclass(frozen=True)
class Toy:
    """The `Model` protocol for a law that is a function of the tokens read so far."""

    vocab_size: int = VOCAB
    eos_id: int = EOS

    reads = ()

    def init(self, key):
        return {"logits": jax.random.normal(key, (self.vocab_size, self.vocab_size))}

    def abstract(self):
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self):
        return jax.tree.map(lambda x: ("unmodeled",) * x.ndim, self.abstract())

    def prefill(self, params, prompt, slots, *, taps=()):
        """The text is start token and prefix; the prompt's first token is kept where cross K/V stand."""
        del taps
        batch = prompt.length.shape[0]
        first = prompt.tokens[:, :1, None, None]
        cache = Cache(self.open(batch, slots).kv, jnp.zeros(batch, jnp.int32), ((first, first),))
        cache, text = prefix.force(self, params, cache, prompt, slots, 0)
        return Prefilled(cache, text, {}, prompt)

    def open(self, batch, width):
        kv = caches.empty_kv(1, (batch, 1, width, 1), jnp.float32)
        return Open(kv, jnp.zeros((batch, width), jnp.int32))

    def extend(self, params, cache, block, open=None, at=0, *, taps=(), logits_from=0):
        del taps
        if open is None:
            open = self.open(*block.mask.shape[::2])
        position = cache.length[:, None] + block.depth
        open = _write(open, block.tokens, position, at)
        tokens, whole = _history(cache, open, block.mask, position)
        logits = self.law(params, cache.cross[0][0][:, 0, 0], tokens, position)
        logits = jnp.where(whole[..., None], logits, jnp.nan)
        return Extended(logits[:, logits_from:], {}, open)

    def commit(self, cache, open, keep, count):
        return caches.commit(cache, open, keep, count)

    def rewind(self, cache, length):
        return caches.rewind(cache, length)

    def law(self, params, first, tokens, position):
        """Logits ``[B, M, V]`` after ``tokens[b, m, : position[b, m] + 1]``."""
        raise NotImplementedError


class Table(Toy):
    """The next token's logits are a row of a table, chosen by the last token."""

    def law(self, params, first, tokens, position):
        del first
        last = jnp.take_along_axis(tokens, jnp.maximum(position, 0)[..., None], axis=2)[..., 0]
        return params["logits"][last]


class Script(Toy):
    """Says ``says[i]`` as output i while the outputs before it are ``path[:i]``, else `OFF_PATH`.

    The prompt's first token says which script of ``params`` a row reads.
    """

    def law(self, params, first, tokens, position):
        path, says = params["path"][first[:, 0]], params["says"][first[:, 0]]
        index = jnp.arange(path.shape[1], dtype=jnp.int32)[None, None]
        room = jnp.pad(tokens, ((0, 0), (0, 0), (0, path.shape[1])), constant_values=-1)
        outputs = room[:, :, 1 : path.shape[1] + 1]
        same = (outputs == path[:, None]) | (index >= position[..., None])
        at = jnp.clip(position, 0, path.shape[1] - 1)
        word = jnp.take_along_axis(says, at, axis=1)
        word = jnp.where(same.all(-1) & (position < path.shape[1]) & (word != -1), word, OFF_PATH)
        logits = 10 * jax.nn.one_hot(word, self.vocab_size)
        logits = jnp.where((word == NAN)[..., None], jnp.nan, logits)
        return jnp.where((word == MASKED)[..., None], -jnp.inf, logits)


def _write(open, tokens, position, at):
    """Tokens into the open keys, positions into the open values, from slot ``at`` on."""
    new = (tokens, position)
    kv = tuple(
        caches.write_open(old, x.astype(jnp.float32)[:, None, :, None], at)
        for old, x in zip(open.kv[0], new, strict=True)
    )
    zero, at = jnp.zeros((), jnp.int32), jnp.asarray(at, jnp.int32)
    return Open((kv,), jax.lax.dynamic_update_slice(open.position, position, (zero, at)))


def _history(cache, open, mask, position):
    """Tokens by position ``[B, M, T]`` and whether each is there exactly once, ``[B, M]``."""
    stored = [
        jnp.concatenate([c[:, 0, :, 0], o[:, 0, :, 0]], axis=1).astype(jnp.int32)
        for c, o in zip(cache.kv[0], open.kv[0], strict=True)
    ]
    tokens, places = (x[:, None, :, None] for x in stored)
    slots = jnp.arange(cache.kv[0][0].shape[2], dtype=jnp.int32)[None, None]
    cached = jnp.broadcast_to(slots < cache.length[:, None, None], (*mask.shape[:2], slots.size))
    seen = jnp.concatenate([cached, mask], axis=2)
    index = jnp.arange(seen.shape[2], dtype=jnp.int32)[None, None]
    here = seen[..., None] & (places == index[..., None, :])
    once = here.sum(2, dtype=jnp.int32) == (index <= position[..., None]).astype(jnp.int32)
    whole = once.all(-1) & (seen.sum(-1, dtype=jnp.int32) == position + 1)
    return jnp.where(here, tokens, 0).sum(2, dtype=jnp.int32), whole


def scripts(*rows, says=None):
    """Parameters of a `Script` with these rows; ``says`` are what it says on those paths."""
    pad = lambda row: [*row, *[-1] * (SCRIPT_LENGTH - len(row))]  # noqa: E731
    table = lambda rows: jnp.asarray([pad(row) for row in rows], jnp.int32)  # noqa: E731
    return {"path": table(rows), "says": table(rows if says is None else says)}


def script_prompt(*which):
    """A prompt for each of these scripts."""
    return prompt(*[[i] for i in which])


def prompt(*rows, width=None):
    """Rows of tokens as a prompt, padded with 0."""
    width = width or max(len(row) for row in rows)
    tokens = [[*row, *[0] * (width - len(row))] for row in rows]
    return Prompt(jnp.asarray(tokens, jnp.int32), jnp.asarray([len(r) for r in rows], jnp.int32))


def play(target, draft, *, says=None, gamma=3, max_new=8, **kwargs):
    """Decodes rows of scripts greedily, row b of ``target`` against row b of ``draft``.

    ``says`` replaces what the draft says along its path. Up to three rows run as three, so that
    most tests share one compiled program.
    """
    rows, batch = len(target), max(3, len(target))
    full = lambda x: [*x, *[x[-1]] * (batch - rows)]  # noqa: E731
    out = generate(
        Script(),
        scripts(*full(target)),
        script_prompt(*range(batch)),
        drafter=SmallModel(Script(), gamma),
        draft_params=scripts(*full(draft), says=says and full(says)),
        max_decode_len=max_new,
        **kwargs,
    )
    return jax.tree.map(lambda x: x[:rows], out)


def scripted(path, says):
    """Decoder, parameters and prompt of rows with one path, whose drafts say ``says``."""
    decoder = loop.Decoder(Script(), 8, SmallModel(Script(), 3))
    paths = [path] * len(says)
    both = Params(scripts(*paths), scripts(*paths, says=says))
    return decoder, both, script_prompt(*range(len(says)))


def table_pair(seed, size=3, spread=1.5):
    """Random logits of a target and a draft table, float64 NumPy."""
    rng = np.random.default_rng(seed)
    return spread * rng.normal(size=(2, size, size))


def tiny_t5(**changes) -> t5.T5:
    """A T5 of a few thousand parameters."""
    sizes = dict(
        vocab_size=VOCAB,
        emb_dim=16,
        num_heads=2,
        head_dim=4,
        mlp_dim=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    return t5.T5(t5.T5Config(**(sizes | changes)))


@functools.partial(jax.jit, static_argnums=0)
def init(model, seed):
    """Parameters from a seed, compiled; in float64 where the model computes in it."""
    dtype = model.config.dtype if isinstance(model, t5.T5) else "float32"
    params = model.init(jax.random.key(seed))
    return jax.tree.map(lambda x: x.astype(dtype) if dtype == "float64" else x, params)


@jax.jit
def noisy(params, seed, scale):
    """A copy of the parameters with relative noise: a draft that often, not always, agrees."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    scale = jnp.asarray(scale, leaves[0].dtype)
    shake = lambda x, key: x + scale * x.std() * jax.random.normal(key, x.shape, x.dtype)  # noqa: E731
    return treedef.unflatten([shake(x, key) for x, key in zip(leaves, keys, strict=True)])


# What most tests of T5 decode with: one program per gamma.
BATCH, STEPS, T5 = 4, 24, tiny_t5()


def ask(seed, batch=BATCH, width=6) -> Prompt:
    """Random prompts of unequal lengths 1 .. width."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, VOCAB, size=(batch, width)).astype(np.int32)
    lengths = rng.permutation(np.arange(batch) % width) + 1
    return Prompt(jnp.asarray(tokens), jnp.asarray(lengths.astype(np.int32)))


def pair_of(seed):
    """Parameters of a target and of a draft that agrees with it most of the time."""
    params = init(T5, seed)
    return params, noisy(params, seed, 0.2)


def decode(params, prompt, draft=None, *, gamma=3, model=T5, steps=STEPS, **kwargs):
    """`generate`, speculatively where draft parameters are given."""
    drafter = None if draft is None else SmallModel(model, gamma)
    return generate(
        model, params, prompt, drafter=drafter, draft_params=draft, max_decode_len=steps, **kwargs
    )


class Round(NamedTuple):
    """A round seen from outside: what was proposed, and the state before and after it."""

    tree: object
    before: loop.State
    after: loop.State


@functools.partial(jax.jit, static_argnums=0)
def jit_round(decoder, params, state, sampling):
    keys = laws.fold(state.keys, state.stats.rounds)
    tree, _ = decoder.drafter.propose(params, state.drafter, state.text, sampling, keys)
    return tree, loop.speculative_round(decoder, params, state, sampling=sampling)


def row_keys(key, batch):
    """The keys `generate` gives to rows 0 .. batch - 1."""
    ids = jnp.arange(batch, dtype=jnp.int32)
    return laws.fold(jnp.broadcast_to(key, (batch,)), ids)


def drive(decoder, params: Params, ask: Prompt, sampling=None, key=None) -> list[Round]:
    """The rounds of a decode, driven by hand until every row has ended."""
    batch = ask.length.shape[0]
    keys = row_keys(jax.random.key(0) if key is None else key, batch)
    sampling = (sampling or Sampling()).rows(batch)
    state, rounds = loop.jit_start(decoder, params, ask, keys), []
    while (np.asarray(state.finish) == stopping.LIVE).any():
        tree, after = jit_round(decoder, params, state, sampling)
        rounds.append(Round(tree, state, after))
        state = after
        assert len(rounds) <= decoder.max_decode_len, "a live row did not advance"
    return rounds


class NearTie(NamedTuple):
    """The first difference of two greedy outputs, where the target's logits are almost equal."""

    row: int
    index: int
    gap: float


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, ask, outputs):
    mask = jnp.arange(ask.tokens.shape[1], dtype=jnp.int32)[None] < ask.length[:, None]
    inputs = jnp.pad(outputs, ((0, 0), (1, 0)))[:, :-1]
    return model.forward(params, ask.tokens, mask, inputs)


def teacher_forced(model, params, ask, outputs):
    """Logits ``[B, T, V]`` of a T5 after each prefix of ``outputs``; row i judges output i."""
    return np.asarray(_forward(model, params, ask, outputs))


def differences(model, params, ask, plain, other) -> list[NearTie]:
    """Where two greedy decodes differ; fails unless each first difference is a near-tie."""
    ties, rows = [], list(zip(emitted(plain), emitted(other), strict=True))
    for row, (a, b) in enumerate(rows):
        if a == b:
            continue
        index = next(
            (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), -1
        )
        assert index >= 0, f"row {row}: one output is cut short: {a} {b}"
        logits = teacher_forced(model, params, ask, plain.tokens)[row, index]
        gap = abs(float(logits[a[index]] - logits[b[index]]))
        assert gap <= 1e-4 * max(1.0, float(np.abs(logits).max())), f"row {row}: {a} {b}, {gap}"
        ties.append(NearTie(row, index, gap))
    return ties


def emitted(out: loop.Decoded) -> list[list[int]]:
    """The tokens of each row up to its length."""
    pairs = zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)
    return [row[:length].tolist() for row, length in pairs]
