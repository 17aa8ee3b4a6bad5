"""Medusa's heads: each says one token further ahead, from the target's last hidden state alone.

References:
  Cai et al. 2024 (2401.10774), section 2.1.1; Stern et al. 2018 (1811.03115), section 3, for heads of
  another shape with the same use.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, Float, PyTree

from specjax.models import heads, layers
from specjax.models.base import Tabled
from specjax.models.draft_vocab import DraftVocab


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Sizes.

    Attributes:
      vocab_size: V, pieces of the target.
      emb_dim: d, width of the target's hidden state.
      heads: how many tokens ahead; head i says the token behind the next i + 1.
      layers: residual blocks per head.
      own_output: whether every head has an output layer of its own; else they share one, the target's.
      draft_vocab: the pieces that heads can say; None for all.
      alone: parameters without the output layer that heads share; they do not decode.
      dtype: activations. Logits are float32 at least.
    """

    vocab_size: int
    emb_dim: int
    heads: int = 4
    layers: int = 1
    own_output: bool = True
    draft_vocab: DraftVocab | None = None
    alone: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "draft_vocab", heads.checked(self))
        if min(self.heads, self.layers) < 1:
            raise ValueError(f"at least one head and layer, got {self.heads} and {self.layers}")


@dataclasses.dataclass(frozen=True)
class Medusa(Tabled):
    """Heads on a target's last hidden state. Static: parameters are passed in."""

    config: MedusaConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer): residual blocks begin at nothing, so that a head whose
        output layer is the target's begins as the target's own."""
        c = self.config
        block = {
            "weight": ((c.emb_dim, c.emb_dim), ("mlp", "embed"), initializers.zeros),
            "bias": ((c.emb_dim,), ("mlp",), initializers.zeros),
        }
        normal = initializers.normal(0.02)
        output = {"weight": ((heads.known(c), c.emb_dim), ("vocab", "embed"), normal)}
        head = {f"layer_{i}": block for i in range(c.layers)}
        own = {"output": output} if c.own_output else {}
        out: dict[str, Any] = {f"head_{i}": head | own for i in range(c.heads)}
        return out if c.own_output or c.alone else out | {"output": output}

    def states(self, params: PyTree, hidden: Float[Array, "B M d"]) -> list[Float[Array, "B M d"]]:
        """What every head's output layer reads: x + SiLU(W x + b), block after block."""
        out = []
        for i in range(self.config.heads):
            x = hidden.astype(self.config.dtype)
            for j in range(self.config.layers):
                block = params[f"head_{i}"][f"layer_{j}"]
                y = layers.linear(x, block["weight"])
                x = x + jax.nn.silu(y + block["bias"].astype(y.dtype)[None, None])
            out.append(x)
        return out

    def known_logits(
        self, params: PyTree, hidden: Float[Array, "B M d"]
    ) -> Float[Array, "B M heads K"]:
        """Logits of the known pieces: head i's at token t are of token t + 2 + i."""
        wide = np.promote_types(self.config.dtype, np.float32)
        states = self.states(params, hidden)
        if not self.config.own_output:  # read once for all heads
            return layers.linear(jnp.stack(states, axis=2), params["output"]["weight"], wide)
        own = [params[f"head_{i}"]["output"]["weight"] for i in range(self.config.heads)]
        found = [layers.linear(x, rows, wide) for x, rows in zip(states, own, strict=True)]
        return jnp.stack(found, axis=2)

    def logits(self, params: PyTree, hidden: Float[Array, "B M d"]) -> Float[Array, "B M heads V"]:
        """The same of all pieces: minus infinity for what cannot be said."""
        known = self.known_logits(params, hidden)
        vocab = self.config.draft_vocab
        return known if vocab is None else vocab.whole(known)

    def tile(self, params: PyTree) -> PyTree:
        """The parameters laid out for a CPU (`layers.tile`)."""
        return jax.tree.map(lambda leaf: layers.tile(leaf) if leaf.ndim == 2 else leaf, params)

    def beside(self, target: Any) -> "Medusa":
        """The heads as they decode with a target, whose output layer they have if they share one."""
        del target
        return Medusa(dataclasses.replace(self.config, alone=False))

    def taken(self, target: Any, params: PyTree) -> PyTree:
        """What heads take from their target: an output layer that they share, if they have no own ones.

        Args:
          target: the target.
          params: its parameters, tiled or not.

        Raises:
          ValueError: the target has other sizes.
        """
        heads.check_target(self.config, target)
        if self.config.own_output:
            return {}
        return {"output": {"weight": heads.output_rows(self.config, target, params)}}


def begun(model: Medusa, params: PyTree, target: Any, known: PyTree) -> PyTree:
    """Heads whose output layers are the target's, which is how training begins.

    Args:
      model: the heads.
      params: their parameters, the residual blocks at nothing.
      target: the target.
      known: its parameters, tiled or not.

    Raises:
      ValueError: the target has other sizes.
    """
    heads.check_target(model.config, target)
    given = heads.output_rows(model.config, target, known)
    return jax.tree.map_with_path(
        # an array for each head, since training gives all of them away
        lambda path, leaf: jnp.array(given, leaf.dtype) if path[-2].key == "output" else leaf, params
    )  # fmt: skip
