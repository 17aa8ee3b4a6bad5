"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated feed-forward.

Llama 1 to 3, Vicuna, TinyLlama, SmolLM2, Mistral without its sliding window, and Qwen2 with its biases.
Parameters are named as Hugging Face names them.

References:
  Touvron et al. 2023 (2302.13971); Su et al. 2021 (2104.09864) for rotary positions; Ainslie et al. 2023
  (2305.13245) for grouped queries; Chen et al. 2023 (2306.15595) for linear scaling, Grattafiori et al. 2024
  (2407.21783) for Llama 3's.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, Float, Int, PyTree

from specjax.models import layers, stack
from specjax.models.causal import Attend, Causal, Places, project
from specjax.models.draft_vocab import DraftVocab

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Scaling of rotary positions.

    Attributes:
      kind: "default", "linear" (positions divided by ``factor``), "dynamic" (the base grows with the
        text beyond ``original_max_positions``), or "llama3" (long waves divided, short ones kept).
      factor: how much longer texts become.
      low_freq_factor, high_freq_factor: of llama3: waves longer than ``original_max_positions`` over
        these are stretched, shorter ones kept, those between blended.
      original_max_positions: longest text before scaling.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self):
        kinds = ("default", "linear", "dynamic", "llama3")
        if self.kind not in kinds:
            raise ValueError(f"rotary scaling {self.kind!r} is not one of {', '.join(kinds)}")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and variants.

    Attributes:
      vocab_size: rows of the embedding table.
      emb_dim: width d of the residual stream.
      num_layers: depth.
      num_heads, num_kv_heads, head_dim: attention; each key and value head serves
        ``num_heads / num_kv_heads`` queries, and ``num_heads * head_dim`` need not be ``emb_dim``.
      mlp_dim: width of the feed-forward layer.
      activation: of its gate.
      rope_theta, rope: base and scaling of the rotary positions.
      tie_embeddings: the output layer is the embedding.
      qkv_bias, out_bias, mlp_bias: which projections have biases (Qwen2: the first).
      norm_eps: of RMSNorm.
      max_positions: what the model was trained for; texts may be longer.
      bos_id, eos_id, pad_id: special ids; None for none.
      other_eos_ids: further ids that end a text (Llama 3 has three).
      draft_vocab: a draft that knows only these of the ``vocab_size`` pieces; its tables have a row for
        each (the embedding one more, for all others). None for all.
      scan_layers: see `specjax.models.stack`.
      dtype: activations and K/V. Logits are float32 at least.
    """

    vocab_size: int = 32000
    emb_dim: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128
    mlp_dim: int = 11008
    activation: str = "silu"
    rope_theta: float = 10000.0
    rope: Rope = Rope()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_eps: float = 1e-6
    max_positions: int = 4096
    bos_id: int | None = 1
    eos_id: int = 2
    pad_id: int = 0
    other_eos_ids: tuple[int, ...] = ()
    draft_vocab: DraftVocab | None = None
    scan_layers: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "other_eos_ids", tuple(self.other_eos_ids))
        if isinstance(self.rope, dict):
            object.__setattr__(self, "rope", Rope(**self.rope))
        if isinstance(self.draft_vocab, dict):
            object.__setattr__(self, "draft_vocab", DraftVocab(**self.draft_vocab))
        if self.draft_vocab is not None and self.draft_vocab.vocab_size != self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab.vocab_size} pieces, the model has {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} key and value heads do not divide {self.num_heads} heads"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}"
            )


@dataclasses.dataclass(frozen=True)
class Llama(Causal):
    """A Llama behind the `Model` protocol. Static: parameters are passed in."""

    config: LlamaConfig = LlamaConfig()

    @property
    def pad_id(self) -> int:
        return self.config.pad_id

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter, under Hugging Face's names."""
        c = self.config
        joined, grouped = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def linear(out: int, out_axis: str, inp: int, in_axis: str, bias: bool) -> dict:
            weight = {"weight": ((out, inp), (out_axis, in_axis), initializers.normal(0.02))}
            return weight | ({"bias": ((out,), (out_axis,), initializers.zeros)} if bias else {})

        def norm() -> dict:
            return {"weight": ((c.emb_dim,), ("embed",), initializers.ones)}

        layer = {
            "input_layernorm": norm(),
            "self_attn": {
                "q_proj": linear(joined, "joined_kv", c.emb_dim, "embed", c.qkv_bias),
                "k_proj": linear(grouped, "grouped_kv", c.emb_dim, "embed", c.qkv_bias),
                "v_proj": linear(grouped, "grouped_kv", c.emb_dim, "embed", c.qkv_bias),
                "o_proj": linear(c.emb_dim, "embed", joined, "joined_kv", c.out_bias),
            },
            "post_attention_layernorm": norm(),
            "mlp": {
                "gate_proj": linear(c.mlp_dim, "mlp", c.emb_dim, "embed", c.mlp_bias),
                "up_proj": linear(c.mlp_dim, "mlp", c.emb_dim, "embed", c.mlp_bias),
                "down_proj": linear(c.emb_dim, "embed", c.mlp_dim, "mlp", c.mlp_bias),
            },
        }
        out = stack.table(c.num_layers, layer, c.scan_layers)
        said = c.vocab_size if c.draft_vocab is None else len(c.draft_vocab)
        read = said + (c.draft_vocab is not None)
        out["embed_tokens"] = linear(read, "vocab", c.emb_dim, "embed", False)
        out["norm"] = norm()
        if not c.tie_embeddings:
            out["lm_head"] = linear(said, "vocab", c.emb_dim, "embed", False)
        return out

    def embed(self, params: PyTree, tokens: Int[Array, "B M"], places: Places) -> Array:
        del places
        if self.config.draft_vocab is not None:
            tokens = jnp.asarray(self.config.draft_vocab.own)[tokens]
        return params["embed_tokens"]["weight"].astype(self.config.dtype)[tokens]

    def shared(self, places: Places) -> tuple[Array, Array]:
        return rotary(self.config, places)

    def layer(
        self, weights: PyTree, x: Float[Array, "B M d"], shared: tuple[Array, Array], attend: Attend
    ):
        y = x
        if "input_layernorm" in weights:  # EAGLE's layer has none
            y = layers.rms_norm(x, weights["input_layernorm"]["weight"], self.config.norm_eps)
        read, kept = self.attention(weights["self_attn"], y, shared, attend)
        return self.feed_forward(weights, x + read), kept

    def attention(
        self, weights: PyTree, y: Float[Array, "B M K"], shared: tuple[Array, Array], attend: Attend
    ):
        """(what attention reads ``[B, M, d]``, what it kept) for normed states."""
        c, (cos, sin) = self.config, shared
        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
        query, key, value = (
            layers.split_heads(project(weights[name], y), count) for name, count in heads.items()
        )
        query = rotate(query, cos, sin) * jnp.asarray(c.head_dim**-0.5, y.dtype)
        read, kept = attend(query, rotate(key, cos, sin), value)
        return project(weights["o_proj"], layers.join_heads(read)), kept

    def feed_forward(self, weights: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        """Adds the gated feed-forward layer's output."""
        c, mlp = self.config, weights["mlp"]
        y = layers.rms_norm(x, weights["post_attention_layernorm"]["weight"], c.norm_eps)
        gate = ACTIVATIONS[c.activation](project(mlp["gate_proj"], y))
        return x + project(mlp["down_proj"], gate * project(mlp["up_proj"], y))

    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        return layers.rms_norm(x, params["norm"]["weight"], self.config.norm_eps)

    def output(self, params: PyTree) -> Float[Array, "..."]:
        weight = super().output(params)
        tied = self.config.draft_vocab is not None and "lm_head" not in params
        return weight[:-1] if tied else weight  # the last row is of the pieces that it cannot say

    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        return layers.linear(x, self.output(params), np.promote_types(x.dtype, np.float32))


def rotary(config: LlamaConfig, places: Places) -> tuple[Array, Array]:
    """Cosines and sines ``[B, 1, M, D]`` of every token's angles, the half of them twice."""
    wide = np.promote_types(config.dtype, np.float32)
    position = places.position.astype(wide)
    if config.rope.kind == "dynamic":
        frequencies = _dynamic(config, places.span.astype(wide))
    else:
        frequencies = jnp.asarray(_frequencies(config), wide)[None, None]
    angles = position[..., None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B H M D"], cos: Array, sin: Array) -> Float[Array, "B H M D"]:
    """Rotates pairs (i, i + D/2) of every head, as Hugging Face orders them."""
    wide = x.astype(cos.dtype)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (wide * cos + turned * sin).astype(x.dtype)


def _frequencies(config: LlamaConfig) -> np.ndarray:
    """Angle per position, ``[D/2]``."""
    rope, exponent = config.rope, np.arange(0, config.head_dim, 2, dtype=np.float64)
    plain = config.rope_theta ** -(exponent / config.head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind != "llama3":
        return plain
    turns = rope.original_max_positions * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = np.clip((turns - rope.low_freq_factor) / span, 0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _dynamic(config: LlamaConfig, span: Float[Array, "B M"]) -> Float[Array, "B M half"]:
    """The same where the base grows with the text ("NTK-aware"): ``span`` tokens are there."""
    rope, dim = config.rope, config.head_dim
    length = jnp.maximum(span, rope.original_max_positions)
    grown = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
    base = config.rope_theta * grown ** (dim / (dim - 2))
    exponent = jnp.asarray(np.arange(0, dim, 2) / dim, span.dtype)
    return base[..., None] ** -exponent[None, None]
