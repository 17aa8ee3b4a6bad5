"""OPT: learned positions, layer norms and biases; with or without the norms of 350m.

Parameters are named as Hugging Face names them.

References:
  Zhang et al. 2022 (2205.01068).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, Float, Int, PyTree

from specjax.models import layers, stack
from specjax.models.causal import Attend, Causal, Places, project

# The first two rows of the position table stand for no position.
OFFSET = 2


@dataclasses.dataclass(frozen=True)
class OptConfig:
    """Sizes and variants.

    Attributes:
      vocab_size: rows of the embedding table (50272 for 50265 pieces).
      emb_dim: width d of the residual stream.
      word_dim: width of the embedding table, which 350m projects to ``emb_dim`` and back.
      num_layers, num_heads: depth; heads of width ``emb_dim / num_heads``.
      mlp_dim: width of the feed-forward layer.
      norm_first: norms before each sublayer, and one at the end; 350m has them behind each.
      max_positions: tokens of the longest text.
      norm_eps: of the layer norms.
      bos_id, eos_id, pad_id: special ids.
      scan_layers: see `specjax.models.stack`.
      dtype: activations and K/V. Logits are float32 at least.
    """

    vocab_size: int = 50272
    emb_dim: int = 768
    word_dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    mlp_dim: int = 3072
    norm_first: bool = True
    max_positions: int = 2048
    norm_eps: float = 1e-5
    bos_id: int = 2
    eos_id: int = 2
    pad_id: int = 1
    scan_layers: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        if self.emb_dim % self.num_heads:
            raise ValueError(f"{self.num_heads} heads do not divide width {self.emb_dim}")

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.emb_dim // self.num_heads

    @property
    def other_eos_ids(self) -> tuple[int, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class Opt(Causal):
    """An OPT behind the `Model` protocol. Static: parameters are passed in."""

    config: OptConfig = OptConfig()

    @property
    def pad_id(self) -> int:
        return self.config.pad_id

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter, under Hugging Face's names."""
        c = self.config

        def weight(out: int, out_axis: str, inp: int, in_axis: str) -> dict:
            return {"weight": ((out, inp), (out_axis, in_axis), initializers.normal(0.02))}

        def linear(out: int, out_axis: str, inp: int, in_axis: str) -> dict:
            bias = {"bias": ((out,), (out_axis,), initializers.zeros)}
            return weight(out, out_axis, inp, in_axis) | bias

        def norm() -> dict:
            shape, axes = (c.emb_dim,), ("embed",)
            scale, bias = (shape, axes, initializers.ones), (shape, axes, initializers.zeros)
            return {"weight": scale, "bias": bias}

        into = linear(c.emb_dim, "joined_kv", c.emb_dim, "embed")
        layer = {
            "self_attn": {
                "q_proj": into,
                "k_proj": into,
                "v_proj": into,
                "out_proj": linear(c.emb_dim, "embed", c.emb_dim, "joined_kv"),
            },
            "self_attn_layer_norm": norm(),
            "fc1": linear(c.mlp_dim, "mlp", c.emb_dim, "embed"),
            "fc2": linear(c.emb_dim, "embed", c.mlp_dim, "mlp"),
            "final_layer_norm": norm(),
        }
        out = stack.table(c.num_layers, layer, c.scan_layers)
        out["embed_tokens"] = weight(c.vocab_size, "vocab", c.word_dim, "embed")
        rows = c.max_positions + OFFSET
        out["embed_positions"] = weight(rows, "abspos_buckets", c.emb_dim, "embed")
        if c.norm_first:
            out["final_layer_norm"] = norm()
        if c.word_dim != c.emb_dim:
            out["project_in"] = weight(c.emb_dim, "embed", c.word_dim, "unmodeled")
            out["project_out"] = weight(c.word_dim, "unmodeled", c.emb_dim, "embed")
        return out

    def embed(self, params: PyTree, tokens: Int[Array, "B M"], places: Places) -> Array:
        """Embedding and position. What lies past the longest text reads its last position: as a target
        this model's length limit cuts it, as a draft it says nothing that counts."""
        c = self.config
        x = params["embed_tokens"]["weight"].astype(c.dtype)[tokens]
        if "project_in" in params:
            x = project(params["project_in"], x)
        row = places.position.clip(0, c.max_positions - 1) + OFFSET
        return x + params["embed_positions"]["weight"].astype(c.dtype)[row]

    def layer(self, weights: PyTree, x: Float[Array, "B M d"], shared: None, attend: Attend):
        del shared
        c, attention = self.config, weights["self_attn"]
        first, second = (
            lambda x, name=name: _norm(weights[name], x, c.norm_eps)
            for name in ("self_attn_layer_norm", "final_layer_norm")
        )
        y = first(x) if c.norm_first else x
        query, key, value = (
            layers.split_heads(project(attention[f"{name}_proj"], y), c.num_heads) for name in "qkv"
        )
        query = query * jnp.asarray(c.head_dim**-0.5, x.dtype)
        read, kept = attend(query, key, value)
        x = x + project(attention["out_proj"], layers.join_heads(read))
        x = x if c.norm_first else first(x)
        y = second(x) if c.norm_first else x
        x = x + project(weights["fc2"], jax.nn.relu(project(weights["fc1"], y)))
        return x if c.norm_first else second(x), kept

    def finish(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M d"]:
        if "final_layer_norm" not in params:
            return x
        return _norm(params["final_layer_norm"], x, self.config.norm_eps)

    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        if "project_out" in params:
            x = project(params["project_out"], x)
        return layers.linear(x, self.output(params), np.promote_types(x.dtype, np.float32))


def _norm(weights: PyTree, x: Float[Array, "B M d"], eps: float) -> Float[Array, "B M d"]:
    return layers.layer_norm(x, weights["weight"], weights["bias"], eps)
