"""Tiny decoder-only models, and the ways to read a text with them that must agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import generate
from specjax.decode.interfaces import Block
from specjax.drafters.small_model import SmallModel
from specjax.models import stack
from specjax.models.llama import Llama, LlamaConfig
from specjax.models.opt import Opt, OptConfig
from tests import toys


def tiny_llama(**changes) -> Llama:
    """A Llama of a few thousand parameters: grouped queries, heads wider than their share."""
    sizes = dict(
        vocab_size=toys.VOCAB, emb_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
        mlp_dim=32, norm_eps=1e-5, max_positions=64, bos_id=0, eos_id=toys.EOS,
    )  # fmt: skip
    return Llama(LlamaConfig(**sizes | changes))


def tiny_opt(**changes) -> Opt:
    sizes = dict(
        vocab_size=toys.VOCAB, emb_dim=16, word_dim=16, num_layers=2, num_heads=2, mlp_dim=32,
        max_positions=64, bos_id=0, eos_id=toys.EOS, pad_id=0,
    )  # fmt: skip
    return Opt(OptConfig(**sizes | changes))


def init(model, seed):
    """Random parameters far from their initial values, in the model's type; a scanned model's are
    the unrolled one's. NumPy's: a program that makes them takes longer to compile than the model."""
    rng = np.random.default_rng(seed)
    made = jax.tree.map_with_path(
        lambda path, leaf: jnp.asarray(_leaf(path, rng.normal(size=leaf.shape)), leaf.dtype),
        model.unrolled.abstract(model.config.dtype),
    )
    return stack.pile(made) if model.config.scan_layers else made


def noisy(params, seed, scale):
    """A copy with relative noise: a draft that often, not always, agrees."""
    rng = np.random.default_rng(seed)
    shake = lambda x: x + jnp.asarray(scale * np.std(x) * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(shake, params)


def _leaf(path, noise):
    *above, last = (part.key for part in path)
    if "norm" in "".join(above):
        return 0.2 * noise + (last == "weight")
    if last == "bias" or above[-1].startswith("embed"):
        return 0.4 * noise
    return 1.2 * noise * noise.shape[1] ** -0.5


def words(batch, steps, seed=0):
    """Random tokens ``[B, T]``, no EOS among them."""
    return np.random.default_rng(seed).integers(2, toys.VOCAB, (batch, steps)).astype(np.int32)


def chain(tokens) -> Block:
    """A causal block of these tokens ``[B, M]``."""
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, width = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    mask = jnp.broadcast_to(jnp.asarray(np.tri(width, dtype=bool)), (batch, width, width))
    return Block(tokens, depth, mask)


@functools.partial(jax.jit, static_argnums=(0, 3), static_argnames="taps")
def prefill(model, params, prompt, slots, taps=()):
    return model.prefill(params, prompt, slots, taps=taps)


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens):
    return model.forward(params, tokens)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("taps", "logits_from"))
def extend(model, params, cache, block, open=None, at=0, taps=(), logits_from=0):
    return model.extend(params, cache, block, open, at, taps=taps, logits_from=logits_from)


@functools.partial(jax.jit, static_argnums=0)
def steps(model, params, cache, text):
    """Reads ``text`` ``[B, T]`` token by token: (cache, logits ``[B, T, V]``)."""
    batch = text.shape[0]
    first, one = jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)

    def step(cache, token):
        read = model.extend(params, cache, chain(token[:, None]))
        return model.commit(cache, read.open, first, one), read.logits[:, 0]

    cache, logits = jax.lax.scan(step, cache, text.T)
    return cache, logits.transpose(1, 0, 2)


@functools.partial(jax.jit, static_argnums=0)
def cut_back(model, cache, length):
    """The cache when it held ``length`` tokens of each row."""
    return model.rewind(cache, jnp.asarray(length, jnp.int32))


def repeated(cache, times):
    """The cache of one row, as that of many."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), cache)


def decode(model, params, prompt, draft=None, *, drafter=None, steps=16, **options):
    """`generate`, speculatively where there are draft parameters; gamma is 3."""
    small = None if draft is None else SmallModel(drafter or model, 3)
    return generate(
        model, params, prompt, drafter=small, draft_params=draft, max_decode_len=steps, **options
    )


def same_decode(a, b) -> None:
    """Tokens and all counts equal."""
    for name in ("tokens", "lengths", "finish_reason"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name, count in a.stats._asdict().items():
        np.testing.assert_allclose(count, getattr(b.stats, name), rtol=1e-6, err_msg=name)


def check_counts(out, steps, gamma=3) -> None:
    """What holds of the counts of any decode with a chain of ``gamma`` drafts."""
    stats, lengths = jax.tree.map(np.asarray, out.stats), np.asarray(out.lengths)
    np.testing.assert_array_equal(stats.emitted, lengths)
    assert (0 < lengths).all() and (lengths <= steps).all()
    assert (stats.accepted <= stats.tested).all() and (stats.tested <= stats.drafted).all()
    assert (stats.drafted <= gamma * stats.rounds).all()
    np.testing.assert_array_equal(stats.histogram.sum(1), stats.rounds - stats.rounds_plain)
    # Every round ends by a token of the target's own, unless an EOS or the limit cut it.
    own = lengths - stats.accepted
    assert ((stats.rounds - 1 <= own) & (own <= stats.rounds)).all()
    assert ((0 <= stats.overlap) & (stats.overlap <= stats.tested + 1e-3)).all()


def check_log_probs(model, params, prompt, out) -> None:
    """At temperature 1 the reported law is the softmax of the logits, read token by token."""
    width = prompt.tokens.shape[1]
    read = prefill(model, params, prompt, out.tokens.shape[1] + 1)
    root = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    text = jnp.concatenate([root, out.tokens[:, :-1]], axis=1)
    assert read.text.tokens.shape[1] == width + out.tokens.shape[1] + 1
    logits = steps(model, params, read.cache, text)[1]
    law = jax.nn.log_softmax(logits, axis=-1)
    expected = jnp.take_along_axis(law, out.tokens[..., None], axis=2)[..., 0]
    inside = np.arange(out.tokens.shape[1])[None] < np.asarray(out.lengths)[:, None]
    expected = np.where(inside, expected, 0)
    np.testing.assert_allclose(out.log_probs, expected, atol=1e-5)
    assert np.std(expected[inside]) > 0.1
