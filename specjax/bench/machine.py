"""What the machine's memory gives, and what a decoding step must read: the bound of a plain step.

With one row a decoder reads each weight once and multiplies it once, so that memory bandwidth bounds
the step; the bound is the bytes of a step over the best of three measured bandwidths.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from specjax.bench import timing
from specjax.models import reads

# Weights of one shape that is common in small decoders; enough of them to leave any L3 cache.
PROBE_WEIGHT = (1024, 512)


class StepBytes(NamedTuple):
    """What one decoding step reads, in bytes.

    Attributes:
      weights: decoder weights and the output layer; of an embedding table that is not also the
        output layer, only the rows looked up.
      kv: keys and values, all slots of the cache and of cross-attention.
    """

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


def bandwidth_probes(megabytes: int = 256, repeats: int = 7) -> dict[str, float]:
    """GB/s of three ways to stream memory; medians of interleaved repeats.

    Args:
      megabytes: size of what is streamed; several times the L3 cache.
      repeats: turns.

    Returns:
      ``sum`` (reads one big array), ``dot`` (one-row products with distinct weights, as a decoder
      makes them), ``triad`` (a = b + s a, in place: two reads and a write).
    """
    size = megabytes * 2**20
    calls = {"sum": _sum_probe(size), "dot": _dot_probe(size), "triad": _triad_probe(size)}
    seconds = timing.interleaved({name: call for name, (call, _) in calls.items()}, repeats)
    return {name: calls[name][1] / taken.median / 1e9 for name, taken in seconds.items()}


def _sum_probe(size: int):
    array = jnp.ones((size // 4096, 1024), jnp.float32)
    total, _ = timing.compiled(jnp.sum, array)
    return functools.partial(total, array), array.nbytes


def _triad_probe(size: int):
    a, b = (jnp.full(size // 12, value, jnp.float32) for value in (1.0, 2.0))
    triad, _ = timing.compiled(lambda a, b: b + jnp.float32(0.5) * a, a, b, donate_argnums=0)
    held = [a]

    def call():  # in place: a fresh output would measure page faults
        held[0] = triad(held[0], b)
        return held[0]

    return call, 3 * b.nbytes


def _dot_probe(size: int):
    count = max(1, size // (PROBE_WEIGHT[0] * PROBE_WEIGHT[1] * 4))
    weights = distinct_weights(count, PROBE_WEIGHT)
    x = jnp.ones((1, PROBE_WEIGHT[1]), jnp.float32)
    dot = lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))  # noqa: E731
    products, _ = timing.compiled(functools.partial(stream, dot), x, weights, 1)
    return functools.partial(products, x, weights, 1), sum(w.nbytes for w in weights)


def distinct_weights(count: int, shape: tuple[int, int], dtype=jnp.float32) -> list[Array]:
    """``count`` random matrices in memory of their own."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    return [make(jax.random.key(i)) for i in range(count)]


def stream(product, x: Array, weights: list[Array], passes) -> Array:
    """Multiplies ``x`` with all weights ``passes`` times, in a loop as decoding has it.

    Each product depends on the one before, so that none is dropped, hoisted or overlapped.
    """

    def one(_, x):
        for weight in weights:
            y = product(x, weight)
            x = x + 1e-9 * (
                y[..., :1] + y[..., -1:]
            )  # of one slice only its columns would be computed
        return x

    return lax.fori_loop(0, passes, one, x)


def bytes_per_step(params: PyTree, cache) -> StepBytes:
    """Bytes a plain step reads.

    Args:
      params: weights, or their shapes.
      cache: the target's cache as the loop carries it, or its shapes: all its slots are read,
        whatever their lengths.

    Returns:
      Weights without an encoder and without cross-attention's keys and values, which are made once;
      and K/V.
    """
    batch = cache.length.shape[0]
    rows = [
        jax.ShapeDtypeStruct((batch, table.shape[1]), table.dtype)
        for table in reads.looked_up(params)
    ]
    kv = jax.tree.leaves((cache.kv, cache.cross))
    return StepBytes(sum(map(_bytes, [*reads.whole(params), *rows])), sum(map(_bytes, kv)))


def _bytes(leaf) -> int:
    return int(leaf.size) * jnp.dtype(leaf.dtype).itemsize
