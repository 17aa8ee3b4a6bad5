"""Layers shared by all model families, as free functions on arrays.

Axis letters: B rows, M block tokens, S cache slots, W open slots, H heads, D head size,
K inputs and N outputs of a projection, V vocabulary, R rows of a matrix product.

Weights are stored ``[out, in]`` (the leaf is called ``weight``, as in PyTorch; T5X's ``kernel`` is
its transpose). For decoding on a CPU they can be laid out in tiles, see `tile`.
"""

import functools
import itertools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

# Outputs per tile of a tiled weight: the widest that divides the outputs is taken.
TILES = (64, 32, 16)
# XLA (jaxlib 0.10) gives a product to one core of a CPU unless it has about so many results. Few rows of a
# tiled weight are therefore multiplied in up to MOST_PARTS parts of their inputs, which are summed.
ENOUGH, MOST_PARTS = 1 << 16, 16
# Rows for which that pays.
PARTED_ROWS = range(4, 257)
# Otherwise up to so many rows of a tiled weight are multiplied and summed in one fused loop; of more, a dot
# per tile takes as long.
TILED_ROWS = 1024
# Up to so many rows of a weight that is not tiled are multiplied by its halves: of more, one dot is as fast
# (measured without AVX-512; with it, decoding has its weights in tiles).
HALVED_ROWS = 64


def linear(x: Float[Array, "*rows K"], weight: Float[Array, "..."], dtype=None) -> Array:
    """Projects the last axis: ``x @ weight.T``.

    XLA's CPU dot packs the weight matrix again at each call, which costs more than the product when
    rows are few, and gives few rows to one core. There, few rows are multiplied by the halves of the
    weight (where N is even), one on each core; or, if it is tiled (`tile`), in one fused loop as fast
    as memory delivers the tiles, and 4 to 256 rows in parts, on all cores. Everywhere else this is
    ``dot_general``. The platform is decided when the program is lowered, never by the default
    backend, so that a TPU program lowered from a CPU process holds the dot.

    Args:
      x: activations ``[..., K]``.
      weight: ``[N, K]``, or tiled ``[N / T, K, T]``.
      dtype: type of the result (and of the accumulation); ``x.dtype`` by default.

    Returns:
      ``[..., N]``.
    """
    dtype = dtype or x.dtype
    weight = weight.astype(x.dtype)
    rows = math.prod(x.shape[:-1])
    if weight.ndim == 3:
        parts = _parts(rows, weight.shape)
        batch = functools.partial(_tiled_batch, parts=parts)
        dot, few = _tiled_dot, _tiled if parts == 1 and rows <= TILED_ROWS else batch
    else:
        halved = rows <= HALVED_ROWS and weight.shape[0] % 2 == 0
        dot, few = _dot, _halved if halved else _dot
    return lax.platform_dependent(
        x, weight, cpu=lambda x, w: few(x, w, dtype), default=lambda x, w: dot(x, w, dtype)
    )


def tile(weight: Float[Array, "N K"]) -> Array:
    """Lays a weight out for few rows on this machine's CPU: `in_tiles` where its vectors are long.

    Short ones are too few registers for that, and the forms for weights ``[N, K]`` are faster.
    """
    return in_tiles(weight) if long_vectors() else weight


def in_tiles(weight: Float[Array, "N K"]) -> Array:
    """A weight as ``[N / T, K, T]``; unchanged where no T divides N.

    T outputs lie side by side, so that the sum over K runs in vector registers, one accumulator per
    output and row, through memory in order.
    """
    width = next((t for t in TILES if weight.shape[0] % t == 0), None)
    if width is None:
        return weight
    return weight.reshape(-1, width, weight.shape[1]).transpose(0, 2, 1)


@functools.cache
def long_vectors() -> bool:
    """Whether this machine's CPU has AVX-512; False where the system does not say."""
    described = pathlib.Path("/proc/cpuinfo")
    return described.exists() and " avx512f" in described.read_text(errors="ignore")


def untile(weight: Float[Array, "..."]) -> Float[Array, "N K"]:
    """A weight as ``[N, K]``, whether it is tiled or not."""
    if weight.ndim == 2:
        return weight
    return weight.transpose(0, 2, 1).reshape(-1, weight.shape[1])


def _dot(x: Array, weight: Array, dtype) -> Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, preferred_element_type=dtype)


def _tiled_dot(x: Array, weight: Array, dtype) -> Array:
    return _dot(x, weight, dtype).reshape(*x.shape[:-1], -1)


def _parts(rows: int, tiled: tuple[int, int, int]) -> int:
    """Parts into which the inputs of so many rows are split: a power of 2, or 1 for the fused loop.

    Two are faster than one even where one has results enough.
    """
    tiles, inputs, width = tiled
    results = rows * tiles * width
    if rows not in PARTED_ROWS:
        return 1
    counts = (n for n in (2, 4, 8, MOST_PARTS) if results * n >= ENOUGH)
    found = next(counts, 1)
    return found if inputs % found == 0 else 1


def _tiled_batch(x: Array, weight: Array, dtype, parts: int) -> Array:
    """A dot per tile and part, as a batch: a dot over all tiles would first transpose the weights."""
    tiles, inputs, width = weight.shape
    rows = x.reshape(-1, parts, inputs // parts).swapaxes(0, 1)  # [P, R, K / P]
    rows = lax.optimization_barrier(jnp.broadcast_to(rows, (tiles, *rows.shape)))
    weight = weight.reshape(tiles, parts, inputs // parts, width)
    batched = (((3,), (2,)), ((0, 1), (0, 1)))
    wide = np.promote_types(dtype, np.float32)  # of the sum over parts
    out = lax.dot_general(rows, weight, batched, preferred_element_type=wide).sum(1)
    return out.astype(dtype).swapaxes(0, 1).reshape(*x.shape[:-1], tiles * width)


def _tiled(x: Array, weight: Array, dtype) -> Array:
    flat, weight = _together(x, weight, dtype)
    if flat.shape[0] == 1:
        out = (weight * flat[0][None, :, None]).sum(1)
    else:
        out = (weight[:, None] * flat[None, :, :, None]).sum(2).transpose(1, 0, 2)
    return out.reshape(*x.shape[:-1], -1)


def _halved(x: Float[Array, "*rows K"], weight: Float[Array, "N K"], dtype) -> Array:
    """Both halves of the weights by all rows, as a batch of two products: XLA gives each a core. N is even.

    Weights stand on the left: those that stand there are not packed again. Their products with 4 rows
    and with 8 are fast ones, so that 2 and 3 rows cost as much as 4, and 5 to 7 more than 8 if they are
    not filled up.
    """
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    rows = flat.shape[0]
    flat = jnp.pad(flat, ((0, _whole(rows) - rows), (0, 0)))
    # Kept apart from the product, so that no simplification can make one product of the two again.
    both = lax.optimization_barrier(jnp.broadcast_to(flat, (2, *flat.shape)))
    batched = (((2,), (2,)), ((0,), (0,)))
    halves = weight.reshape(2, outputs // 2, inputs)
    out = lax.dot_general(halves, both, batched, preferred_element_type=dtype)
    return out.reshape(outputs, -1)[:, :rows].T.reshape(*x.shape[:-1], outputs)


def _whole(rows: int) -> int:
    """1, 4, or the next multiple of 8."""
    return rows if rows == 1 else 4 if rows <= 4 else rows + -rows % 8


def _together(x: Array, weight: Array, dtype) -> tuple[Array, Array]:
    """Rows ``[R, K]`` and weights, tied by a barrier.

    Without it XLA sees a loop-invariant broadcast of the weights, hoists it out of the decode loop
    and reads rows times as many bytes in each step.
    """
    x, weight = lax.optimization_barrier((x, weight))
    return x.reshape(-1, x.shape[-1]).astype(dtype), weight.astype(dtype)


def rms_norm(x: Float[Array, "*rows K"], scale: Float[Array, "K"], eps: float) -> Array:
    """Root-mean-square norm without mean or bias, in at least float32."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = scale.astype(wide.dtype)
    return (normed * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows K"], scale: Float[Array, "K"], bias: Float[Array, "K"], eps: float
) -> Float[Array, "*rows K"]:
    """Norm by mean and variance, in at least float32."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    scale, bias = (jnp.expand_dims(v.astype(wide.dtype), range(x.ndim - 1)) for v in (scale, bias))
    return (normed * scale + bias).astype(x.dtype)


def split_heads(x: Float[Array, "B M HD"], heads: int) -> Float[Array, "B H M D"]:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def join_heads(x: Float[Array, "B H M D"]) -> Float[Array, "B M HD"]:
    x = x.transpose(0, 2, 1, 3)
    return x.reshape(*x.shape[:2], -1)


class Dropout:
    """T5X's dropout: a feature is dropped for all tokens of a sequence alike, an attention weight for
    all its queries; each call draws anew.

    Args:
      key: of one training step; None drops nothing.
      rate: share of what is dropped, in [0, 1).

    Raises:
      ValueError: another rate.
    """

    def __init__(self, key: Key[Array, ""] | None = None, rate: float = 0.0):
        if not 0 <= rate < 1:
            raise ValueError(f"the dropout rate must lie in [0, 1), got {rate}")
        self.key, self.rate, self.calls = key, rate, itertools.count()

    def __call__(self, x: Float[Array, "*B M d"]) -> Float[Array, "*B M d"]:
        if self.key is None or self.rate == 0:
            return x
        shape = (*x.shape[:-2], 1, x.shape[-1])
        key = jax.random.fold_in(self.key, next(self.calls))
        kept = jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(kept, x / jnp.asarray(1 - self.rate, x.dtype), jnp.zeros((), x.dtype))

    def of(self, layer: Any) -> "Dropout":
        """A layer's own: scanned layers are traced once, and must not all drop the same."""
        if self.key is None:
            return self
        return Dropout(jax.random.fold_in(self.key, _LAYERS + layer), self.rate)


# Calls are counted from 0, layers from here: no number stands for both.
_LAYERS = 1 << 20

# No dropout: every decode, and training without.
KEEP = Dropout()


def rows_apart(x: Float[Array, "B *rest"]) -> Array:
    """Splits rows over all axes of the mesh in use but ``model``; as it is where there is none.

    Where parameters are split over those axes too, the compiler would otherwise move activations to
    them instead of the other way round. Inside of a decode rows are apart already.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = tuple(n for n, kind in kinds.items() if n != "model" and kind == AxisType.Auto)
    if math.prod(mesh.shape[n] for n in axes) == 1:
        return x
    return lax.with_sharding_constraint(x, P(axes, *[P.UNCONSTRAINED] * (x.ndim - 1)))


def attend(
    query: Float[Array, "B H M D"],
    sources: list[tuple[Array, Array, Array]],
    drop: Dropout = KEEP,
) -> Float[Array, "B H M D"]:
    """Attention with one softmax over several key/value sources, e.g. the cache and open slots.

    No 1/sqrt(D): T5 folds it into the query's initialisation, other models scale the query.

    Args:
      query: ``[B, H, M, D]``.
      sources: (key ``[B, H, S, D]``, value ``[B, H, S, D]``, bias ``[B or 1, H or 1, M or 1, S]``);
        the bias holds -inf where the source may not be read.
      drop: of the weights.

    Returns:
      ``[B, H, M, D]`` in the query's type; the softmax is in at least float32.
    """
    wide = np.promote_types(query.dtype, np.float32)
    scores = [
        jnp.einsum("bhmd,bhsd->bhms", query, key, preferred_element_type=wide) + bias.astype(wide)
        for key, _, bias in sources
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(query.dtype)
    weights = drop(weights)
    edges = np.cumsum([key.shape[2] for key, _, _ in sources])[:-1]
    parts = jnp.split(weights, edges, axis=-1)
    out = [
        jnp.einsum("bhms,bhsd->bhmd", part, value)
        for part, (_, value, _) in zip(parts, sources, strict=True)
    ]
    return sum(out[1:], out[0])


def attend_grouped(
    query: Float[Array, "B H M D"], sources: list[tuple[Array, Array, Array]]
) -> Float[Array, "B H M D"]:
    """`attend` where fewer key and value heads serve groups of neighbouring query heads.

    Queries of a group are read as further tokens of their head, so no key is repeated.

    Args:
      query: scaled.
      sources: (key, value, bias) each; keys and values have G heads, G divides H; biases
        ``[X, 1, M, S]``.
    """
    batch, heads, tokens, width = query.shape
    groups = sources[0][0].shape[1]
    times = heads // groups
    together = query.reshape(batch, groups, times * tokens, width)
    wider = [(key, value, jnp.tile(bias, (1, 1, times, 1))) for key, value, bias in sources]
    return attend(together, wider).reshape(query.shape)


def mask_bias(mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """0 where the mask holds, -inf elsewhere; weakly typed, it takes the type of what it joins."""
    return jnp.where(mask, 0.0, -jnp.inf)


def bucket_edges(buckets: int, max_distance: int) -> np.ndarray:
    """Smallest distance of each relative-position bucket above the exact ones.

    T5 spaces them logarithmically. Comparing integers with these edges gives T5's buckets on every
    platform, where a float32 logarithm may round an edge either way.

    Returns:
      int32 ``[buckets - buckets // 2]``; bucket ``buckets // 2 + i`` starts at ``edges[i]``.
    """
    exact = buckets // 2
    distance = np.arange(1, max_distance + 1, dtype=np.float32)
    ratio = np.log(distance / exact + np.finfo(np.float32).eps) / np.log(max_distance / exact)
    bucket = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int32), buckets - 1)
    bucket = np.where(distance < exact, distance, bucket)
    return np.array([distance[bucket >= b][0] for b in range(exact, buckets)], np.int32)


def relative_buckets(
    relative: Int[Array, "*shape"], buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "*shape"]:
    """T5's bucket of a relative position (key position minus query position).

    References:
      Raffel et al. 2020 (1910.10683), section 2.1; T5X ``relative_position_bucket``.
    """
    offset = jnp.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        offset = jnp.where(relative > 0, buckets, 0).astype(relative.dtype)
        distance = jnp.abs(relative)
    else:
        distance = jnp.maximum(-relative, 0)
    edges = jnp.asarray(bucket_edges(buckets, max_distance), relative.dtype)
    exact = buckets // 2
    far = (distance[..., None] >= jnp.expand_dims(edges, range(relative.ndim))).sum(
        -1, dtype=relative.dtype
    )
    return offset + jnp.where(distance < exact, distance, exact - 1 + far)


def relative_bias(
    embedding: Float[Array, "H buckets"],
    relative: Int[Array, "X M S"],
    max_distance: int,
    bidirectional: bool,
) -> Float[Array, "X H M S"]:
    """Attention bias of relative positions; a one-hot product, since TPUs gather scalars slowly."""
    count = embedding.shape[1]
    bucket = relative_buckets(relative, count, max_distance, bidirectional)
    hot = jax.nn.one_hot(bucket, count, dtype=embedding.dtype)
    return jnp.einsum("xmsk,hk->xhms", hot, embedding)
