"""From logits to the distribution that tokens are drawn from, and draws from it.

Logit processors come first, then temperature, top-k and top-p.

Everything is in log space, in at least float32; impossible tokens have log-probability -inf.
Target and draft go through the same `Sampling`, so q is the distribution drafts are drawn from
("standardized sampling", Leviathan et al. 2211.17192, section 2.2).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode.processors import History

# At or below this temperature sampling is argmax, as in T5X.
GREEDY_TEMPERATURE = 1e-4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Logit processors, then temperature, top-k and top-p (T5X's order).

    The default is greedy. T5X's ``temperature_sample`` too is greedy by default, by ``topk=1``.

    Attributes:
      temperature: one value or one per row; traced, so no value costs a compile. At or below 1e-4
        a row is greedy; the first of equal maxima wins.
      top_k: keep the k most likely tokens; 0 keeps all (static).
      top_p: keep the smallest set of most likely tokens with at least this mass; one value or one
        per row (traced); None keeps all and spares the sort.
      processors: of `specjax.decode.processors`, applied in this order; which ones is static, their
        numbers are traced. None of them, and the program has no trace of any.
    """

    temperature: float | Float[Array, "*B"] = 0.0
    top_k: int = dataclasses.field(default=0, metadata={"static": True})
    top_p: float | Float[Array, "*B"] | None = None
    processors: tuple = ()

    def __post_init__(self):
        if isinstance(self.processors, list):  # gin has lists only
            object.__setattr__(self, "processors", tuple(self.processors))

    def check(self, eos_id: int | tuple[int, ...] | None = None) -> None:
        """Raises ValueError on values outside their range (on the host, before tracing)."""
        if np.any(np.asarray(self.temperature) < 0) or np.any(np.isnan(self.temperature)):
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        top_p = np.asarray(1.0 if self.top_p is None else self.top_p)
        if not np.all((top_p > 0) & (top_p <= 1)):
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        for processor in self.processors:
            processor.check(eos_id)

    def rows(self, batch: int) -> "Sampling":
        """Arrays with one value per row."""
        spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (batch,))  # noqa: E731
        top_p = None if self.top_p is None else spread(self.top_p)
        processors = tuple(processor.rows(batch) for processor in self.processors)
        return Sampling(spread(self.temperature), self.top_k, top_p, processors)


def log_law(
    logits: Float[Array, "B M V"], sampling: Sampling, history: History | None = None
) -> Float[Array, "B M V"]:
    """Log-probabilities of the next token under ``sampling`` (`Sampling.rows` form).

    ``history`` is what was said before each of the M rows; processors need it.

    Greedy rows get all mass on the first maximum. A row with a NaN gets no mass at all (greedy) or
    stays NaN, so that it can be reported (`broken`) and is not mistaken for token 0.
    """
    logits = processed(logits, sampling, history)
    temperature = sampling.temperature.astype(logits.dtype)[:, None, None]
    greedy = temperature <= GREEDY_TEMPERATURE
    scaled = logits / jnp.where(greedy, 1.0, temperature).astype(logits.dtype)
    if sampling.top_k:
        scaled = _keep_top_k(scaled, sampling.top_k)
    log_p = jax.nn.log_softmax(scaled, axis=-1)
    if sampling.top_p is not None:
        log_p = _keep_top_p(log_p, sampling.top_p.astype(logits.dtype)[:, None, None])
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    best = (ids == first_max(logits)) & (logits > -jnp.inf)
    one_hot = jnp.where(best, 0.0, -jnp.inf).astype(logits.dtype)
    return jnp.where(greedy, one_hot, log_p)


def processed(
    logits: Float[Array, "B M V"], sampling: Sampling, history: History | None
) -> Float[Array, "B M V"]:
    """The logits in float32 at least, after the processors."""
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    if sampling.processors and history is None:
        raise ValueError("logit processors need the history of each row")
    for processor in sampling.processors:
        logits = processor(logits, history)
    return logits


def first_max(x: Float[Array, "*rows V"]) -> Int[Array, "*rows 1"]:
    """Index of the first maximum; V, which is no index, in a row with a NaN.

    The same as argmax, by two reductions that XLA's CPU compiler vectorises.
    """
    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(x == x.max(-1, keepdims=True), ids, x.shape[-1]).min(-1, keepdims=True)


def _keep_top_k(logits: Array, k: int) -> Array:
    kth = lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
    return jnp.where(logits >= kth, logits, -jnp.inf)


def _keep_top_p(log_p: Array, top_p: Array) -> Array:
    """Keeps a token while the mass of the strictly likelier ones is below ``top_p``."""
    ordered = -jnp.sort(-log_p, axis=-1)
    before = jnp.cumsum(jnp.exp(ordered), axis=-1) - jnp.exp(ordered)
    # The least likely token that is kept; the most likely one always is.
    last = jnp.maximum((before < top_p).sum(-1, keepdims=True) - 1, 0)
    threshold = jnp.take_along_axis(ordered, last, axis=-1)
    kept = jax.nn.log_softmax(jnp.where(log_p >= threshold, log_p, -jnp.inf), axis=-1)
    return jnp.where(top_p >= 1, log_p, kept)  # the sum over many tokens may round to 1 too soon


def broken(log_p: Float[Array, "*rows V"]) -> Bool[Array, "*rows"]:
    """Rows that are no distribution: NaN, or no possible token."""
    return ~(log_p.max(-1) > -jnp.inf)


def draw(log_p: Float[Array, "B V"], u: Float[Array, "B"]) -> Int[Array, "B"]:
    """The token at quantile ``u`` in [0, 1): exact inverse of the cumulative distribution.

    Cheaper than Gumbel noise (one uniform a row instead of V). Two levels, blocks and tokens in a
    block, spare the cumulative sum over the whole vocabulary. A token of probability 0 is never
    drawn, whatever is rounded.
    """
    batch, size = log_p.shape
    width = max(8, 2 ** math.ceil(math.log2(math.sqrt(size))))
    padded = jnp.pad(log_p, ((0, 0), (0, -size % width)), constant_values=-jnp.inf)
    mass = jnp.exp(padded - padded.max(-1, keepdims=True)).reshape(batch, -1, width)
    block, rest = _pick(mass.sum(-1), u)
    inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
    within, _ = _pick(inside, rest)
    return (block * width + within).astype(jnp.int32)


def _pick(mass: Float[Array, "B N"], u: Float[Array, "B"]) -> tuple[Array, Array]:
    """(first index whose cumulative mass exceeds u x total, quantile within that index)."""
    upto = jnp.cumsum(mass, axis=-1)
    goal = u * upto[:, -1]
    ids = lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    # A parallel cumulative sum may rise where the mass is 0, and u x total may round up to the
    # total: only an index with mass is taken, the last one where none is beyond the goal.
    last = jnp.where(mass > 0, ids, 0).max(-1)
    beyond = (upto > goal[:, None]) & (mass > 0)
    index = jnp.minimum(jnp.where(beyond, ids, mass.shape[-1]).min(-1), last)
    here = jnp.take_along_axis(mass, index[:, None], axis=-1)[:, 0]
    before = jnp.take_along_axis(upto, index[:, None], axis=-1)[:, 0] - here
    rest = jnp.clip((goal - before) / jnp.where(here > 0, here, 1.0), 0.0, 1.0)
    return index, rest


def uniform(keys: Key[Array, "B"], count: int, dtype=jnp.float32) -> Float[Array, "B count"]:
    """Uniforms in [0, 1), each row from its own key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), dtype))(keys)


def fold(keys: Key[Array, "B"], data: int | Int[Array, "B"]) -> Key[Array, "B"]:
    """Folds one number, or one per row, into each row's key."""
    data = jnp.broadcast_to(jnp.asarray(data, jnp.uint32), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, data)
