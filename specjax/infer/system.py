"""What decodes: target, drafter, vocabulary and their weights, from what gin names."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from specjax.checkpoints import int8, t5x
from specjax.data.vocabulary import Vocabulary
from specjax.decode.interfaces import Drafter, Params
from specjax.models.t5 import T5, T5Config

# Names under which a SentencePiece model lies beside a checkpoint.
VOCABULARIES = ("sentencepiece.model", "spiece.model")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Weights of one model.

    Attributes:
      path: an int8 ``.safetensors`` file or a T5X checkpoint.
      model: what the weights must fit; None takes the configuration from the file.
      vocabulary_path: SentencePiece model; None looks beside the checkpoint.
      dtype: of activations, caches and weights; where a ``model`` is given, its own.
    """

    path: str
    model: T5 | None = None
    vocabulary_path: str | None = None
    dtype: str = "float32"

    def load(self) -> tuple[T5, PyTree]:
        """The model and its parameters, laid out for the backend.

        Raises:
          ValueError: there is no such checkpoint, or it does not fit the model.
        """
        model, params = self._read()
        return model, model.tile(params) if jax.default_backend() == "cpu" else params

    def _read(self) -> tuple[T5, PyTree]:
        path = pathlib.Path(self.path).expanduser()
        if path.suffix != ".safetensors":
            model = self.model or T5(self._typed(t5x.infer_config(self.path)))
            return model, t5x.load(self.path, model, model.config.dtype)
        if not path.is_file():
            raise ValueError(f"no checkpoint {self.path}")
        if self.model is None:
            model, params = int8.load_model(path)
            model = T5(self._typed(model.config))
        else:
            model, params = self.model, int8.load(path, self.model)
        return model, jax.tree.map(lambda x: x.astype(model.config.dtype), params)

    def _typed(self, config: T5Config) -> T5Config:
        return dataclasses.replace(config, dtype=self.dtype)

    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary, or None where nothing is said and nothing lies beside the checkpoint."""
        if self.vocabulary_path:
            return Vocabulary.load(pathlib.Path(self.vocabulary_path).expanduser())
        folder = pathlib.Path(self.path).expanduser()
        for place in (folder, folder.parent):
            for name in VOCABULARIES:
                if (place / name).is_file():
                    return Vocabulary.load(place / name)
        return None


class System(NamedTuple):
    """Everything that decodes.

    Attributes:
      target: the model whose text comes out.
      drafter: None decodes plainly.
      params: weights of both.
      vocabulary: of both.
    """

    target: T5
    drafter: Drafter | None
    params: Params
    vocabulary: Vocabulary


def load(
    target: Checkpoint,
    drafter: Callable[..., Drafter] | None = None,
    draft: Checkpoint | None = None,
) -> System:
    """Loads a target and, where a drafter is named, its draft.

    Args:
      target: its weights.
      drafter: makes the drafter; called with ``model=`` the draft if there is one.
      draft: the draft's weights, for drafters that have any.

    Raises:
      ValueError: a checkpoint is missing or does not fit, no vocabulary was found, or target and
        draft do not have the same pieces.
    """
    model, weights = target.load()
    vocabulary = target.vocabulary()
    if vocabulary is None:
        raise ValueError(
            f"no vocabulary ({' or '.join(VOCABULARIES)}) beside {target.path}; set vocabulary_path"
        )
    if vocabulary.size > model.vocab_size:
        raise ValueError(
            f"the vocabulary has {vocabulary.size} pieces, the target only {model.vocab_size} rows"
        )
    if drafter is None or draft is None:
        made = None if drafter is None else drafter()
        return System(model, made, Params(weights, None), vocabulary)
    small, draft_weights = draft.load()
    check_same_pieces(vocabulary, model, small, draft)
    return System(model, drafter(model=small), Params(weights, draft_weights), vocabulary)


def check_same_pieces(vocabulary: Vocabulary, model: T5, small: T5, draft: Checkpoint) -> None:
    """Raises ValueError unless target and draft have the same pieces, not only as many.

    A draft of other pieces drafts other words, whatever its ids say.
    """
    if small.vocab_size != model.vocab_size:
        raise ValueError(
            f"target and draft have {model.vocab_size} and {small.vocab_size} pieces; they must "
            "share a vocabulary"
        )
    theirs = draft.vocabulary()
    if theirs is not None and theirs.pieces() != vocabulary.pieces():
        pairs = zip(vocabulary.pieces(), theirs.pieces(), strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
        raise ValueError(f"target and draft have other pieces (the first at id {at})")


def fingerprint(params: PyTree) -> str:
    """Short digest of the first values of every parameter, to tell one set of weights from another."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        head = jax.device_get(jnp.ravel(leaf)[:64])
        digest.update(repr((leaf.shape, str(leaf.dtype))).encode() + head.tobytes())
    return digest.hexdigest()[:16]
