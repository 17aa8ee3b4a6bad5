"""T5 v1.0 and v1.1 as a decoding target, a draft model and a trainable network.

The encoder runs once and its keys and values for cross-attention are computed once; the decoder
reads blocks of any length against a ragged cache. Relative-position bias comes from positions
(cache slots, open positions), so it is right inside trees too.

References:
  Raffel et al. 2020 (1910.10683); Shazeer 2020 (2002.05202) for the gated feed-forward of v1.1.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, Bool, Float, Int, PyTree

from specjax.decode.interfaces import Block, Extended, Open, Prefilled, Prompt
from specjax.models import cache as caches
from specjax.models import layers, prefix, stack
from specjax.models.base import Base
from specjax.models.cache import Cache

ACTIVATIONS = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and variants.

    Attributes:
      vocab_size: rows of the embedding table (T5X pads it: 32128 for 32100 used).
      emb_dim: width d of the residual stream.
      num_heads, head_dim: attention; their product need not be ``emb_dim``.
      mlp_dim: width of the feed-forward layer.
      num_encoder_layers, num_decoder_layers: depths.
      mlp_activations: ("gelu", "linear") for v1.1, ("relu",) for v1.0.
      logits_via_embedding: tied output layer with the factor d^-1/2 (v1.0).
      shared_relative_bias: one bias per stack (T5), or one per layer (scanned T5X, umT5).
      encoded_dim: for a decoder without an encoder, the width of the encoder output it reads, which
        another model made (a draft that shares its target's encoder).
      scan_layers: layers are scanned (`specjax.models.stack`): one is compiled, for deep models.
      relative_buckets, max_distance: relative-position buckets.
      dtype: activations and K/V. Logits are float32 at least.
    """

    vocab_size: int = 32128
    emb_dim: int = 512
    num_heads: int = 6
    head_dim: int = 64
    mlp_dim: int = 1024
    num_encoder_layers: int = 8
    num_decoder_layers: int = 8
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    logits_via_embedding: bool = False
    shared_relative_bias: bool = True
    scan_layers: bool = False
    relative_buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    dtype: str = "float32"
    eos_id: int = 1
    encoded_dim: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        unknown = set(self.mlp_activations) - set(ACTIVATIONS)
        if unknown:
            raise ValueError(f"unknown activations {sorted(unknown)}; known: {sorted(ACTIVATIONS)}")
        if self.encoded_dim is not None and self.num_encoder_layers:
            raise ValueError(
                f"encoded_dim {self.encoded_dim} says that another model encodes, but there are "
                f"{self.num_encoder_layers} encoder layers; make them 0"
            )


@dataclasses.dataclass(frozen=True)
class T5(Base):
    """T5 behind the `Model` protocol. Static: parameters are passed in."""

    config: T5Config = T5Config()

    start_id = 0
    pad_id = 0

    @property
    def reads(self) -> tuple[str, ...]:
        """Taps of another model's prefill that this one's `prefill` takes."""
        return () if self.config.encoded_dim is None else ("encoded",)

    @property
    def kv_layers(self) -> tuple[int, int]:
        return self.config.num_decoder_layers, self.config.num_heads

    # Parameters.

    def table(self) -> PyTree[tuple]:
        """Of every parameter, under T5X's names, scaled as T5X does (queries by d^-1/2 D^-1/2, so no
        1/sqrt(D) later)."""
        return parameter_table(self.config)

    def tile(self, params: PyTree) -> PyTree:
        """The parameters with the weights of a decoding step laid out for a CPU (`layers.tile`).

        Numerically the same model; `layers.linear` takes either layout. The encoder and the keys
        and values of cross-attention read whole prompts, many rows at once, and stay as they are;
        so do scanned layers, of which a step copies each. On accelerators leave all weights as they are.
        """

        def of(path, leaf):
            names = [part.key for part in path]
            many = (
                names[0] == "encoder"
                or stack.SCANNED in names
                or "encoder_decoder_attention" in names
                and ("key" in names or "value" in names)
            )
            return layers.tile(leaf) if names[-1] == "weight" and not many else leaf

        return jax.tree.map_with_path(of, params)

    # Decoding.

    def prefill(
        self, params: PyTree, prompt: Prompt, slots: int, *, taps=(), encoded=None
    ) -> Prefilled:
        """Runs the encoder and prepares cross-attention; the text is start token and prefix.

        Its one tap is ``encoded``, the encoder's output ``[B, L, d]``: the first round has no
        decoder state yet. A model that shares another's encoder is given that output.
        """
        config, batch = self.config, prompt.tokens.shape[0]
        mask = jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)[None] < prompt.length[:, None]
        encoded = self.encode(params, prompt.tokens, mask, encoded)
        read = lambda _, layer, i: (None, cross_kv(config, layer, encoded))  # noqa: E731
        cross = caches.joined(stack.run(params["decoder"], read, None)[1])
        kv = self.empty_kv(batch, slots)
        cache = Cache(kv, jnp.zeros(batch, jnp.int32), cross, mask)
        cache, text = prefix.force(self, params, cache, prompt, slots, self.start_id)
        return Prefilled(cache, text, {"encoded": encoded} if "encoded" in taps else {}, prompt)

    def encode(
        self, params: PyTree, tokens, mask, encoded=None, drop=layers.KEEP, remat_policy="none"
    ) -> Float[Array, "B L d"]:
        """The encoder's output; for a model without encoder the one that it is given.

        Raises:
          ValueError: it has none, and is given none or one of another width.
        """
        width = self.config.encoded_dim
        if width is None:
            return encode(self.config, params, tokens, mask, drop, remat_policy)
        if encoded is None:
            raise ValueError("this T5 has no encoder: it needs its target's output (encoded_dim)")
        if encoded.shape[-1] != width:
            raise ValueError(
                f"this T5 reads an encoder output of width {width} (encoded_dim), but the target's"
                f" has {encoded.shape[-1]}"
            )
        return encoded

    def extend(
        self,
        params: PyTree,
        cache: Cache,
        block: Block,
        open: Open | None = None,
        at=0,
        *,
        taps=(),
        logits_from=0,
    ) -> Extended:
        """Reads ``block`` behind the cache. See `Model.extend`."""
        seen, open = self._behind(params, cache, block, open, at)
        seen["final"] = self.finish(params, seen["last"])
        logits = project_logits(self.config, params, seen["final"][:, logits_from:])
        given = {name: seen[name] for name in taps if name != "encoded"}  # that came by prefill
        return Extended(logits, given, open)

    def words(self, params: PyTree, tokens: Any) -> Float[Array, "B M d"]:
        """What the decoder's first layer reads."""
        return embed(self.config, params, tokens)

    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        """What the output layer reads: the last layer's output, normed."""
        return layers.rms_norm(x, params["decoder"]["decoder_norm"]["scale"], self.config.norm_eps)

    def output(self, params: PyTree) -> Float[Array, "..."]:
        """The output layer on what `finish` gives, tiled or not; a tied one with its scale."""
        if self.config.logits_via_embedding:
            table = params["token_embedder"]["embedding"]
            return table * jnp.asarray(self.config.emb_dim**-0.5, table.dtype)
        return params["decoder"]["logits_dense"]["weight"]

    def _behind(self, params: PyTree, cache: Cache, block: Block, open, at) -> tuple[dict, Open]:
        """(states by tap, the open slots with the block) of what is read behind a cache."""
        config = self.config
        open, position, at = self.placed(cache, block, open, at)
        bias_of = _decoder_bias(config, params["decoder"], cache, block, position, open.position)
        cross_bias = layers.mask_bias(cache.cross_mask)[:, None, None]

        def body(x, layer, i):
            fresh = None
            cached, opened = bias_of(layer)

            def self_attend(query, key, value):
                nonlocal fresh
                fresh = caches.write_layer(open.kv, i, (key, value), at)
                kept = caches.layer(cache.kv, i)
                return layers.attend(query, [(*kept, cached), (*fresh, opened)])

            cross = (*caches.layer(cache.cross, i), cross_bias)
            return decoder_layer(config, layer, x, self_attend, cross), (fresh, x)

        x, outs = stack.run(params["decoder"], body, self.words(params, block.tokens))
        kv, seen = stack.split(outs)
        return seen | {"last": x}, open._replace(kv=caches.joined(kv))

    # Training.

    def forward(
        self,
        params: PyTree,
        inputs: Int[Array, "B L"],
        input_mask: Bool[Array, "B L"],
        decoder_inputs: Int[Array, "B T"],
        encoded: Float[Array, "B L d"] | None = None,
        drop: layers.Dropout = layers.KEEP,
        remat_policy: str = "none",
    ) -> Float[Array, "B T V"]:
        """Teacher-forced logits of every decoder position; ``decoder_inputs`` begin with start.

        ``encoded`` is the output of `encode`, where that is at hand, or must come from another model.
        ``drop`` stands where T5X has dropout; ``remat_policy`` see `stack.run`.
        """
        if encoded is None:
            encoded = self.encode(params, inputs, input_mask, None, drop, remat_policy)
        x = drop(self.words(params, decoder_inputs))
        x = self._teach(params, x, encoded, input_mask, drop, remat_policy)["last"]
        return layers.rows_apart(project_logits(self.config, params, drop(self.finish(params, x))))

    def states(
        self,
        params: PyTree,
        encoded: Float[Array, "B L d"],
        input_mask: Bool[Array, "B L"],
        decoder_inputs: Int[Array, "B T"],
        taps: tuple[str, ...],
    ) -> dict[str, Float[Array, "B T d"]]:
        """The decoder's hidden states after each of its inputs, by tap."""
        seen = self._teach(params, self.words(params, decoder_inputs), encoded, input_mask)
        seen["final"] = self.finish(params, seen["last"])
        return {name: seen[name] for name in taps}

    def _teach(
        self, params, x, encoded, input_mask, drop=layers.KEEP, remat_policy="none"
    ) -> dict[str, Float[Array, "B T d"]]:
        """States by tap of whole decoder texts."""
        config, decoder = self.config, params["decoder"]
        cross_bias = layers.mask_bias(input_mask)[:, None, None]
        steps = jnp.arange(x.shape[1], dtype=jnp.int32)
        relative = (steps[None] - steps[:, None])[None]
        causal = layers.mask_bias(relative <= 0)[:, None]
        bias_of = _bias_of(config, decoder, relative, False, causal)

        def body(x, layer, i):
            dropped = drop.of(config.num_encoder_layers + i)
            bias = bias_of(layer)
            attend = lambda q, k, v: layers.attend(q, [(k, v, bias)], dropped)  # noqa: E731
            cross = (*cross_kv(config, layer, encoded), cross_bias)
            out = decoder_layer(config, layer, x, attend, cross, dropped)
            return layers.rows_apart(out), (None, x)

        x, outs = stack.run(decoder, body, layers.rows_apart(x), remat_policy)
        return stack.split(outs)[1] | {"last": x}


def encode(
    config: T5Config,
    params: PyTree,
    tokens: Int[Array, "B L"],
    mask: Bool[Array, "B L"],
    drop: layers.Dropout = layers.KEEP,
    remat_policy: str = "none",
) -> Float[Array, "B L d"]:
    """The encoder's output, normed."""
    encoder = params["encoder"]
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    relative = (steps[None] - steps[:, None])[None]
    padding = layers.mask_bias(mask)[:, None, None]
    bias_of = _bias_of(config, encoder, relative, True, padding)

    def body(x, layer, i):
        dropped = drop.of(i)
        bias = bias_of(layer)
        y = layers.rms_norm(x, layer["pre_attention_layer_norm"]["scale"], config.norm_eps)
        attend = lambda q, k, v: layers.attend(q, [(k, v, bias)], dropped)  # noqa: E731
        x = x + dropped(self_attention(config, layer["attention"], y, attend))
        return layers.rows_apart(x + dropped(feed_forward(config, layer, x, dropped))), None

    x = layers.rows_apart(drop(embed(config, params, tokens)))
    x, _ = stack.run(encoder, body, x, remat_policy)
    return drop(layers.rms_norm(x, encoder["encoder_norm"]["scale"], config.norm_eps))


def decoder_layer(
    config: T5Config,
    layer: PyTree,
    x: Float[Array, "B M d"],
    self_attend: Callable,
    cross: tuple,
    drop: layers.Dropout = layers.KEEP,
) -> Float[Array, "B M d"]:
    """Self-attention (as the caller arranges it), cross-attention, feed-forward."""
    y = layers.rms_norm(x, layer["pre_self_attention_layer_norm"]["scale"], config.norm_eps)
    x = x + drop(self_attention(config, layer["self_attention"], y, self_attend))
    y = layers.rms_norm(x, layer["pre_cross_attention_layer_norm"]["scale"], config.norm_eps)
    weights = layer["encoder_decoder_attention"]
    query = layers.split_heads(layers.linear(y, weights["query"]["weight"]), config.num_heads)
    read = layers.join_heads(layers.attend(query, [cross], drop))
    x = x + drop(layers.linear(read, weights["out"]["weight"]))
    return x + drop(feed_forward(config, layer, x, drop))


def self_attention(config: T5Config, weights: PyTree, y: Array, attend: Callable) -> Array:
    query, key, value = (
        layers.split_heads(layers.linear(y, weights[name]["weight"]), config.num_heads)
        for name in ("query", "key", "value")
    )
    return layers.linear(layers.join_heads(attend(query, key, value)), weights["out"]["weight"])


def cross_kv(config: T5Config, layer: PyTree, encoded: Float[Array, "B L d"]) -> tuple:
    """Keys and values of the encoder's output for one decoder layer, ``[B, H, L, D]`` each."""
    weights = layer["encoder_decoder_attention"]
    return tuple(
        layers.split_heads(layers.linear(encoded, weights[name]["weight"]), config.num_heads)
        for name in ("key", "value")
    )


def feed_forward(
    config: T5Config,
    layer: PyTree,
    x: Float[Array, "B M d"],
    drop: layers.Dropout = layers.KEEP,
) -> Array:
    """Normed, gated feed-forward layer (without the residual)."""
    y = layers.rms_norm(x, layer["pre_mlp_layer_norm"]["scale"], config.norm_eps)
    weights, names = layer["mlp"], _mlp_inputs(config)
    hidden = [
        ACTIVATIONS[activation](layers.linear(y, weights[name]["weight"]))
        for name, activation in zip(names, config.mlp_activations, strict=True)
    ]
    return layers.linear(drop(math.prod(hidden[1:], start=hidden[0])), weights["wo"]["weight"])


def embed(config: T5Config, params: PyTree, tokens: Int[Array, "B M"]) -> Float[Array, "B M d"]:
    return params["token_embedder"]["embedding"].astype(config.dtype)[tokens]


def project_logits(config: T5Config, params: PyTree, x: Float[Array, "B M d"]) -> Array:
    """Logits in float32 at least; through the embedding, scaled by d^-1/2, where it is tied."""
    wide = np.promote_types(x.dtype, np.float32)
    if config.logits_via_embedding:
        x = x * jnp.asarray(config.emb_dim**-0.5, x.dtype)
        return layers.linear(x, params["token_embedder"]["embedding"], wide)
    return layers.linear(x, params["decoder"]["logits_dense"]["weight"], wide)


def _bias_of(
    config, parameters, relative: Int[Array, "X M S"], bidirectional: bool, mask
) -> Callable:
    """Layer to attention bias, masked; where all layers share one it is made once."""

    def of(owner) -> Array:
        embedding = owner["relpos_bias"]["rel_embedding"]
        bias = layers.relative_bias(embedding, relative, config.max_distance, bidirectional)
        return bias + mask

    if not config.shared_relative_bias:
        return of
    shared = of(parameters)
    return lambda layer: shared


def _decoder_bias(config, parameters, cache, block, position, open_position) -> Callable:
    """Decoder layer to its biases towards the cache's slots and towards the open slots."""
    count = caches.slots(cache.kv)
    slots = jnp.arange(count, dtype=jnp.int32)
    cached = layers.mask_bias(slots[None] < cache.length[:, None])[:, None, None]
    opened = layers.mask_bias(block.mask)[:, None]
    to_cache = slots[None, None] - position[:, :, None]
    to_open = open_position[:, None] - position[:, :, None]
    of_cache = _bias_of(config, parameters, to_cache, False, cached)
    of_open = _bias_of(config, parameters, to_open, False, opened)
    return lambda layer: (of_cache(layer), of_open(layer))


def _mlp_inputs(config: T5Config) -> list[str]:
    """T5X's names: ``wi`` for one activation, ``wi_0``, ``wi_1`` for a gated layer."""
    count = len(config.mlp_activations)
    return ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]


def parameter_table(config: T5Config) -> PyTree[tuple]:
    """(shape, logical axes, initializer) of every parameter, under T5X's names."""
    c = config
    joined = c.num_heads * c.head_dim
    fan_in = initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=0)
    query = initializers.variance_scaling(
        1.0 / c.head_dim, "fan_in", "truncated_normal", in_axis=1, out_axis=0
    )
    # T5X initialises embeddings with deviation 1.0
    unit, ones = initializers.normal(1.0), initializers.ones

    # cross-attention's keys and values read another model's width where it encodes
    memory = c.emb_dim if c.encoded_dim is None else c.encoded_dim

    def weight(out, out_axis, inp, in_axis, init=fan_in):
        return {"weight": ((out, inp), (out_axis, in_axis), init)}

    def attention(read: int):
        project = {n: weight(joined, "joined_kv", read, "embed") for n in ("key", "value")}
        project["query"] = weight(joined, "joined_kv", c.emb_dim, "embed", query)
        return project | {"out": weight(c.emb_dim, "embed", joined, "joined_kv")}

    def norm():
        return {"scale": ((c.emb_dim,), ("embed",), ones)}

    def relpos():
        shape = (c.num_heads, c.relative_buckets)
        scale = initializers.variance_scaling(1.0, "fan_avg", "uniform")
        return {"rel_embedding": (shape, ("heads", "relpos_buckets"), scale)}

    def layer(attentions: dict[str, str]):
        cross = "encoder_decoder_attention"
        out = {name: attention(memory if name == cross else c.emb_dim) for name in attentions}
        out |= {
            f"pre_{norm_name}": norm() for norm_name in (*attentions.values(), "mlp_layer_norm")
        }
        out["mlp"] = {n: weight(c.mlp_dim, "mlp", c.emb_dim, "embed") for n in _mlp_inputs(c)}
        out["mlp"]["wo"] = weight(c.emb_dim, "embed", c.mlp_dim, "mlp")
        return out if c.shared_relative_bias else out | {"relpos_bias": relpos()}

    def layered(depth: int, attentions: dict[str, str]):
        out = stack.table(depth, layer(attentions), c.scan_layers)
        return out | {"relpos_bias": relpos()} if c.shared_relative_bias else out

    encoder = layered(c.num_encoder_layers, {"attention": "attention_layer_norm"})
    decoder = layered(
        c.num_decoder_layers,
        {
            "self_attention": "self_attention_layer_norm",
            "encoder_decoder_attention": "cross_attention_layer_norm",
        },
    )
    encoder["encoder_norm"], decoder["decoder_norm"] = norm(), norm()
    if not c.logits_via_embedding:
        decoder["logits_dense"] = weight(c.vocab_size, "vocab", c.emb_dim, "embed")
    embedding = ((c.vocab_size, c.emb_dim), ("vocab", "embed"), unit)
    table = {"token_embedder": {"embedding": embedding}, "encoder": encoder, "decoder": decoder}
    if c.encoded_dim is not None:
        del table["encoder"]
    return table
