"""The model families by name, as checkpoints and configurations speak of them."""

import dataclasses
import json
from typing import Any, NamedTuple

from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.eagle_t5 import EagleT5, EagleT5Config
from specjax.models.joint import Joint, JointConfig
from specjax.models.llama import Llama, LlamaConfig
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.models.opt import Opt, OptConfig
from specjax.models.t5 import T5, T5Config

Config = T5Config | LlamaConfig | OptConfig | MedusaConfig | JointConfig
Network = T5 | Llama | Opt
# What has parameters and is kept: models that decode, heads, which need a target for that, and both together.
Kept = Network | Medusa | Joint


class Family(NamedTuple):
    """A model's class and its configuration's."""

    model: type
    config: type


# Heads come with a target; EAGLE's are Llamas and T5s too, and so stand before these; EAGLE-3's are EAGLE's.
FAMILIES = {
    "eagle3": Family(Eagle3, Eagle3Config),
    "eagle": Family(Eagle, EagleConfig),
    "eagle_t5": Family(EagleT5, EagleT5Config),
    "medusa": Family(Medusa, MedusaConfig),
    "joint": Family(Joint, JointConfig),
    "t5": Family(T5, T5Config),
    "llama": Family(Llama, LlamaConfig),
    "opt": Family(Opt, OptConfig),
}


def of(config: Config) -> Kept:
    """The model with this configuration."""
    if isinstance(config, JointConfig):
        return Joint(of(config.target), of(config.heads))
    return next(f.model for f in FAMILIES.values() if isinstance(config, f.config))(config)


def name(model: Kept) -> str:
    """Its family's name."""
    return next(name for name, family in FAMILIES.items() if isinstance(model, family.model))


def dump(model: Kept) -> dict[str, Any]:
    """Family and configuration, to be stored as JSON."""
    if isinstance(model, Joint):
        return {
            "model": "joint",
            "config": {"target": dump(model.target), "heads": dump(model.heads)},
        }
    return {"model": name(model), "config": dataclasses.asdict(model.config)}


def parse(family: str, config: dict[str, Any] | str) -> Config:
    """What `dump` made of a configuration.

    Raises:
      ValueError: no such family.
      TypeError: a field that it does not have.
    """
    if family not in FAMILIES:
        raise ValueError(f"no model family {family!r}; known are {', '.join(FAMILIES)}")
    fields = json.loads(config) if isinstance(config, str) else config
    if family == "joint":
        return JointConfig(
            **{n: parse(part["model"], part["config"]) for n, part in fields.items()}
        )
    return FAMILIES[family].config(**fields)
