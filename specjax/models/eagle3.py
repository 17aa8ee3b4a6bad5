"""EAGLE-3's head: it reads three of the target's layers, and learns what it says itself.

Pairs are those of `specjax.models.eagle`, but what stands for a target's state is fused from the states
before three of its layers, and the head's own states stand where there is none. Token and state are normed
and read side by side; the output layer is the head's own, behind a norm.

References:
  Li et al. 2025 (2503.01840), sections 3.1 and 3.2, and the authors' released heads.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.nn import initializers
from jaxtyping import Array, Float, PyTree

from specjax.models import heads, layers
from specjax.models.causal import Attend, Places, project
from specjax.models.eagle import Eagle, EagleConfig, Pairs
from specjax.models.llama import Llama


@dataclasses.dataclass(frozen=True)
class Eagle3Config(EagleConfig):
    """Sizes of the head's layer and output layer, and its target's embedding.

    Attributes:
      reads_layers: of the target; the head reads what goes into them. None are `default_layers` of the target
        that it is beside.
      alone: parameters without the target's embedding, as files of heads may be; they do not decode.
    """

    fc_bias: bool = False
    reads_layers: tuple[int, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.num_layers != 1:
            raise ValueError(f"an EAGLE-3 head has one layer, not {self.num_layers}")
        if self.reads_layers is not None:
            object.__setattr__(self, "reads_layers", tuple(self.reads_layers))
            if len(self.reads_layers) != 3 or min(self.reads_layers) < 0:
                raise ValueError(f"an EAGLE-3 head reads three layers, not {self.reads_layers}")


def default_layers(depth: int) -> tuple[int, int, int]:
    """What released heads read of a target of so many layers: low, middle, high.

    Raises:
      ValueError: it has too few.
    """
    if depth < 6:
        raise ValueError(f"a target of {depth} layers: say which three an EAGLE-3 head reads")
    return 2, depth // 2, depth - 3


@dataclasses.dataclass(frozen=True)
class Eagle3(Eagle):
    """The head, with the caches of a model. Static: parameters are passed in."""

    config: Eagle3Config = Eagle3Config()

    @property
    def taps(self) -> tuple[str, ...]:
        if self.config.reads_layers is None:
            raise ValueError("the head does not know yet which layers of its target it reads")
        return tuple(f"layer_{i}" for i in self.config.reads_layers)

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter; the layer is the authors' ``midlayer``."""
        c, normal = self.config, initializers.normal(0.02)
        layer = dict(Llama.table(self)["layers_0"])
        layer["hidden_norm"] = layer["input_layernorm"]
        attention = dict(layer["self_attn"])
        for name in ("q_proj", "k_proj", "v_proj"):
            (rows, width), axes, made = attention[name]["weight"]
            attention[name] = attention[name] | {"weight": ((rows, 2 * width), axes, made)}
        fused = (c.emb_dim, 3 * c.emb_dim)
        out = {
            "layers_0": layer | {"self_attn": attention},
            "fc": {"weight": (fused, ("embed", "unmodeled"), normal)},
            "norm": {"weight": ((c.emb_dim,), ("embed",), initializers.ones)},
            "lm_head": {"weight": ((heads.known(c), c.emb_dim), ("vocab", "embed"), normal)},
        }
        if c.fc_bias:
            out["fc"]["bias"] = ((c.emb_dim,), ("embed",), initializers.zeros)
        table = {"weight": ((c.vocab_size, c.emb_dim), ("vocab", "embed"), normal)}
        return out if c.alone else out | {"embed_tokens": table}

    def features(self, params: PyTree, states: Float[Array, "B M n"]) -> Float[Array, "B M d"]:
        """The target's three states, fused."""
        return project(params["fc"], states.astype(self.config.dtype))

    def beside(self, target: Any) -> "Eagle3":
        """The head as it decodes with a target, whose embedding it has.

        Raises:
          ValueError: the target is an encoder-decoder, or has too few layers.
        """
        depth = getattr(target.config, "num_layers", None)
        if depth is None:
            raise ValueError(
                f"an EAGLE-3 head of a Llama layer does not fit a {type(target).__name__}"
            )
        read = self.config.reads_layers or default_layers(depth)
        if max(read) >= depth:
            raise ValueError(f"the head reads layers {read}, the target has {depth}")
        return Eagle3(dataclasses.replace(self.config, alone=False, reads_layers=read))

    def join(self, params: PyTree, pairs: Pairs) -> Float[Array, "B M n"]:
        """Token and state side by side; the layer norms each and adds to the state."""
        dtype = self.config.dtype
        words = params["embed_tokens"]["weight"].astype(dtype)[pairs.tokens]
        return jnp.concatenate([words, pairs.states.astype(dtype)], axis=-1)

    def layer(
        self, weights: PyTree, x: Float[Array, "B M n"], shared: tuple[Array, Array], attend: Attend
    ):
        words, states = jnp.split(x, 2, axis=-1)
        norm = lambda x, name: layers.rms_norm(x, weights[name]["weight"], self.config.norm_eps)  # noqa: E731
        y = jnp.concatenate([norm(words, "input_layernorm"), norm(states, "hidden_norm")], axis=-1)
        read, kept = self.attention(weights["self_attn"], y, shared, attend)
        return self.feed_forward(weights, states + read), kept

    def known_logits(self, params: PyTree, x: Float[Array, "B M d"]) -> Float[Array, "B M K"]:
        """The head's own output layer, behind its norm; its states themselves are not normed."""
        x = layers.rms_norm(x, params["norm"]["weight"], self.config.norm_eps)
        return super().known_logits(params, x)

    def taken(self, target: Any, params: PyTree) -> PyTree:
        """What the head takes from its target: the embedding.

        Raises:
          ValueError: the target has other sizes.
        """
        heads.check_target(self.config, target)
        self.beside(target)
        return {"embed_tokens": dict(params["embed_tokens"])}

    def simulated(self, params: PyTree, pairs: Pairs, steps: int) -> list[Float[Array, "B T d"]]:
        """Several steps of drafting from every pair of whole texts, as decoding takes them.

        Step k + 1 reads the token behind that of step k, with the state that step k put out. It sees the
        true pairs up to its own first one, and the steps that led to it from there.

        Args:
          params: the head's.
          pairs: of right-padded texts, with the target's states, fused.
          steps: how many.

        Returns:
          States of every step, which stand for those of the target one token further on each time.

        References:
          Li et al. 2025 (2503.01840), section 3.2 ("training-time test") and figure 6.
        """
        weights = params["layers_0"]
        batch, width = pairs.tokens.shape
        index = jnp.arange(width, dtype=jnp.int32)
        causal = layers.mask_bias(index[None] <= index[:, None])[None, None]
        itself = layers.mask_bias(index[None] == index[:, None])[None, None]
        out, read = [], []

        def attend(query, key, value):
            read.append((key, value, itself if read else causal))
            return layers.attend_grouped(query, read), None

        states = pairs.states
        for step in range(steps):
            place = jnp.broadcast_to(index + step, (batch, width))
            shared = self.shared(Places(place, jnp.full_like(place, width)))
            x = self.join(params, Pairs(jnp.roll(pairs.tokens, -step, axis=1), states))
            states, _ = self.layer(weights, x, shared, attend)
            out.append(states)
        return out
