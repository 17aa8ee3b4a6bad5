"""The model families by name, as checkpoints and configurations speak of them."""

import dataclasses
import json
from typing import Any, NamedTuple

from specjax.models.llama import Llama, LlamaConfig
from specjax.models.opt import Opt, OptConfig
from specjax.models.t5 import T5, T5Config

Config = T5Config | LlamaConfig | OptConfig
Network = T5 | Llama | Opt


class Family(NamedTuple):
    """A model's class and its configuration's."""

    model: type
    config: type


FAMILIES = {
    "t5": Family(T5, T5Config),
    "llama": Family(Llama, LlamaConfig),
    "opt": Family(Opt, OptConfig),
}


def of(config: Config) -> Network:
    """The model with this configuration."""
    return next(f.model for f in FAMILIES.values() if isinstance(config, f.config))(config)


def name(model: Network) -> str:
    """Its family's name."""
    return next(name for name, family in FAMILIES.items() if isinstance(model, family.model))


def dump(model: Network) -> dict[str, Any]:
    """Family and configuration, to be stored as JSON."""
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
    return FAMILIES[family].config(**fields)
