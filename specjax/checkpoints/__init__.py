"""Checkpoints: T5X's, Hugging Face's, GGUF, our own (Orbax), and int8 files for shipping.

`load_any` and `infer_config` take any of them and see what it is.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from specjax.models.families import Config, Network


class _Format(NamedTuple):
    """How to read one kind of checkpoint.

    Attributes:
      config: path to Config.
      load: (path, model, dtype, shardings) to parameters.
    """

    config: Callable[[str], Config]
    load: Callable[..., PyTree]


_LOOKED_FOR = (
    "a T5X folder (a file 'checkpoint', or checkpoint_N/)",
    "a Hugging Face folder (config.json with model.safetensors or model.safetensors.index.json)",
    "a folder of heads (medusa_lm_head, or config.json with EAGLE's fc.weight)",
    "a folder or training run of ours (specjax.json)",
    "an int8 file (*.safetensors)",
    "a GGUF file (*.gguf)",
)


def infer_config(path: str | os.PathLike) -> Config:
    """The configuration of whatever checkpoint lies there; no array is read.

    Args:
      path: a T5X folder (local or ``gs://``), a Hugging Face folder, a folder that `native.save`
        wrote, a training run's, an int8 or a GGUF file.

    Raises:
      ValueError: nothing that is known lies there (the message says what was looked for), or it
        holds no model that can be served.
    """
    return _recognise(path).config(os.fspath(path))


def load_any(
    path: str | os.PathLike,
    model: Network | None = None,
    dtype: Any = "float32",
    shardings: PyTree | None = None,
) -> tuple[Network, PyTree]:
    """Loads whatever checkpoint lies there.

    Args:
      path: see `infer_config`.
      model: what to load it as, e.g. with another type of activations; by default the model that
        the checkpoint describes.
      dtype: type of the parameters returned.
      shardings: see `place.targets`.

    Returns:
      Model and parameters.

    Raises:
      ValueError: as `infer_config`, or the checkpoint does not fit the model.
    """
    from specjax.models import families

    found = _recognise(path)
    model = families.of(found.config(os.fspath(path))) if model is None else model
    return model, found.load(os.fspath(path), model, dtype, shardings)


def _recognise(path: str | os.PathLike) -> _Format:
    text = os.fspath(path)
    if "://" in text:
        return _t5x()
    place = pathlib.Path(text).expanduser()
    if place.is_file() and place.suffix == ".safetensors":
        return _int8()
    if (place / "specjax.json").is_file():
        return _native()
    if place.is_file() and place.suffix == ".gguf":
        return _gguf()
    if (place / "config.json").is_file() and _holds_heads(place):
        return _heads()
    if (place / "config.json").is_file() and list(place.glob("model.safetensors*")):
        return _huggingface(place)
    if place.name == "checkpoint" or list(place.glob("checkpoint*")):
        return _t5x()
    raise ValueError(f"no checkpoint at {place}; looked for {'; '.join(_LOOKED_FOR)}")


# Each needs libraries of its own, some of them slow to import: only the one in use is imported.


def _t5x() -> _Format:
    from specjax.checkpoints import t5x

    return _Format(t5x.infer_config, t5x.load)


def _huggingface(folder: pathlib.Path) -> _Format:
    from specjax.checkpoints import causal, huggingface

    if causal.kind(folder) in causal.KINDS:
        return _Format(causal.read_config, causal.load)

    return _Format(huggingface.read_config, huggingface.load)


def _holds_heads(folder: pathlib.Path) -> bool:
    from specjax.checkpoints import heads

    return heads.recognise(folder)


def _heads() -> _Format:
    from specjax.checkpoints import heads

    return _Format(heads.read_config, heads.load)


def _gguf() -> _Format:
    from specjax.checkpoints import causal, gguf

    def load(path, model, dtype, shardings):
        return causal.from_tensors(gguf.tensors(path), model, dtype, shardings, path)

    return _Format(lambda path: causal.parse(gguf.describe(path), path), load)


def _native() -> _Format:
    from specjax.checkpoints import native

    return _Format(native.read_config, native.load)


def _int8() -> _Format:
    from specjax.checkpoints import int8

    return _Format(int8.read_config, int8.load)
