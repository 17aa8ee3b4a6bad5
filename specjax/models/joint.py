"""A target and heads that are trained together; apart they decode."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from specjax.models import heads
from specjax.models.base import Tabled
from specjax.models.medusa import Medusa, MedusaConfig


@dataclasses.dataclass(frozen=True)
class JointConfig:
    """Both configurations.

    Attributes:
      target: of the target, of any family that decodes.
      heads: of Medusa's heads.
    """

    target: Any
    heads: MedusaConfig

    def __getattr__(self, name: str) -> Any:
        """What shardings ask for (heads of attention) is the target's."""
        if name in ("num_heads", "num_kv_heads", "scan_layers"):
            return getattr(self.target, name)
        raise AttributeError(name)


@dataclasses.dataclass(frozen=True)
class Joint(Tabled):
    """Parameters of both: ``{"target": …, "heads": …}``.

    Attributes:
      target: the target; it is trained too.
      heads: on its last hidden state, with output layers of their own.
    """

    target: Any
    heads: Medusa

    def __post_init__(self):
        heads.check_target(self.heads.config, self.target)
        if not self.heads.config.own_output:
            raise ValueError("heads that share their target's output layer are not trained with it")

    @property
    def config(self) -> JointConfig:
        return JointConfig(self.target.config, self.heads.config)

    def table(self) -> PyTree[tuple]:
        """(shape, logical axes, initializer) of every parameter."""
        return {"target": self.target.table(), "heads": self.heads.table()}
