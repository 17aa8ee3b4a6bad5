"""The small trained pair that ships with the package, with its vocabulary."""

import importlib.resources
import pathlib
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from specjax.checkpoints import int8
from specjax.data.vocabulary import Vocabulary
from specjax.models.t5 import T5

REBUILD = (
    "train with python -m specjax.main --run_mode=train on configs/train/debian_target.gin and"
    " configs/train/debian_draft.gin, then run python scripts/export_pair.py"
)


class Pair(NamedTuple):
    """Target and draft, which share a vocabulary.

    Attributes:
      target: the large model.
      target_params: its parameters, float32.
      draft: the small model.
      draft_params: its parameters, float32.
      vocabulary: from text to ids and back.
    """

    target: T5
    target_params: PyTree
    draft: T5
    draft_params: PyTree
    vocabulary: Vocabulary


def load_pair() -> Pair:
    """Loads the shipped pair; on a CPU its weights are laid out for decoding there (`T5.tile`).

    Returns:
      Models, parameters and vocabulary.

    Raises:
      ValueError: the weights are missing; the message says how to rebuild them.
    """
    with importlib.resources.as_file(folder()) as path:
        files = [path / f"{name}.int8.safetensors" for name in ("target", "draft")]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing in {path}: {REBUILD}")
        target, draft = (int8.load_model(file) for file in files)
        if jax.default_backend() == "cpu":
            target, draft = ((model, model.tile(params)) for model, params in (target, draft))
        return Pair(*target, *draft, Vocabulary.load(path / "sentencepiece.model"))


def folder() -> pathlib.Path:
    """Where the shipped files lie."""
    return importlib.resources.files(__name__) / "debian"
