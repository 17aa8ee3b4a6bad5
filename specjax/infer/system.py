"""What decodes: target, drafter, vocabulary and their weights, from what gin names."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from specjax import checkpoints, pretrained
from specjax.data import datastore
from specjax.data import vocabulary as vocabularies
from specjax.decode import devices, stopping
from specjax.decode.interfaces import Drafter, Params
from specjax.drafters import ngram, rest, trie
from specjax.models.ensemble import Ensemble
from specjax.models.families import Network
from specjax.partitioning.rules import Partitioner
from specjax.training import batches


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Weights of one model.

    Attributes:
      path: what `specjax.pretrained.load` takes: a name, a T5X checkpoint, a Hugging Face folder, a
        GGUF file, a folder of ours, or an int8 ``.safetensors``.
      model: what the weights must fit; None takes the configuration from the checkpoint.
      vocabulary_path: a SentencePiece model, or a folder with one; None looks beside the checkpoint.
      extra_ids: sentinels behind the pieces of that model: 100 for T5's own.
      dtype: of activations, caches and weights; where a ``model`` is given, its own.
      whole: on a mesh, whether every device holds all weights; None for none of a target's, and a
        draft's where its heads do not divide (see `Partitioner.params`).
    """

    path: str
    model: Network | None = None
    vocabulary_path: str | None = None
    extra_ids: int = 0
    dtype: str = "float32"
    whole: bool | None = None

    def load(
        self, partitioner: Partitioner | None = None, target: bool = False
    ) -> tuple[Network, PyTree]:
        """The model and its parameters, laid out for the backend, or on a partitioner's devices.

        Args:
          partitioner: where parameters lie; None is one device.
          target: refuse a mesh that does not divide the heads, unless ``whole`` is asked for.

        Raises:
          ValueError: there is no such checkpoint, it does not fit the model, or the mesh does not
            divide a target's heads.
        """
        path = pretrained.locate(self.path)
        model = pretrained.described(path, self.dtype) if self.model is None else self.model
        if partitioner is None:
            return model, pretrained.weights(path, model)
        if target and not self.whole:
            partitioner.check_heads(model)
        places = partitioner.params(model, self.whole)
        return model, pretrained.weights(path, model, places)

    def vocabulary(self) -> vocabularies.Base | None:
        """The vocabulary, or None where nothing is said and nothing lies beside the checkpoint."""
        if self.vocabulary_path:
            if "://" in self.vocabulary_path:
                raise ValueError(f"{self.vocabulary_path}: copy the vocabulary to a local file")
            place = pathlib.Path(self.vocabulary_path).expanduser()
            if place.is_dir():
                return vocabularies.of_folder(place)
            return vocabularies.Vocabulary.load(place, self.extra_ids)
        return pretrained.vocabulary(pretrained.locate(self.path), self.extra_ids)


@dataclasses.dataclass(frozen=True)
class Counts:
    """A table counted on token arrays, for `specjax.drafters.ngram.Ngram`.

    Attributes:
      path: ``.npz`` of token arrays, whose targets are counted.
      order: 1 for unigrams, 2 for bigrams.
      vocab_size: of the target.
    """

    path: str
    order: int
    vocab_size: int

    def load(self, partitioner: Partitioner | None = None) -> tuple[None, PyTree]:
        """No model, and the table (whole on every device)."""
        count = {1: ngram.unigram_table, 2: ngram.bigram_table}.get(self.order)
        if count is None:
            raise ValueError(f"the order must be 1 or 2, got {self.order}")
        rows, lengths = batches.padded(batches.load_pairs(self.path).targets)
        table = count(rows, lengths, self.vocab_size)
        if partitioner is not None:
            return None, devices.put(table, partitioner.replicated)
        return None, jnp.asarray(table)

    def check(self, model: Network, vocabulary: vocabularies.Base) -> None:
        """Raises ValueError unless the table has as many pieces as the target."""
        del vocabulary
        if self.vocab_size != model.vocab_size:
            raise ValueError(
                f"the table has {self.vocab_size} pieces, the target {model.vocab_size}"
            )


@dataclasses.dataclass(frozen=True)
class Datastore:
    """What scripts/build_datastore.py wrote, for `specjax.drafters.rest.Rest`.

    On a mesh whose axis ``model`` divides the store's parts each device of that axis holds and searches
    its share of them, and what is found is summed: a store too large for one device is built in parts.

    Attributes:
      path: the folder.
      whole: on a mesh, whether every device holds the whole store; None where the parts do not divide.
    """

    path: str
    whole: bool | None = None

    def load(self, partitioner: Partitioner | None = None) -> tuple[None, rest.Store]:
        """No model, and the store on its devices.

        Raises:
          ValueError: there is none, it is unfinished or damaged, or its parts do not divide.
        """
        tokens, suffixes, _ = datastore.load(self.path)
        store = rest.Store(tokens, suffixes)
        if partitioner is None:
            return None, rest.Store(*map(jnp.asarray, store))
        parts, split = len(tokens), partitioner.mesh.shape["model"]
        if self.whole is False and parts % split:
            raise ValueError(
                f"{split} model partitions do not divide the datastore's {parts} parts"
            )
        if self.whole or parts % split:
            return None, devices.put(store, partitioner.replicated)
        return None, devices.put(store, NamedSharding(partitioner.mesh, PartitionSpec("model")))

    def check(self, model: Network, vocabulary: vocabularies.Base) -> None:
        """Raises ValueError unless the store's ids are the target's."""
        del model
        datastore.check_vocabulary(datastore.load(self.path, check=False).meta, vocabulary)


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a drafter that copies knows beforehand: nothing, or the targets of token arrays.

    For `specjax.drafters.prompt_lookup.PromptLookup`, which copies from its own text alone, and
    `specjax.drafters.trie.Trie`. Nothing is added while a file is decoded: what comes out for a prompt would
    depend on which others were decoded before it.

    Attributes:
      path: ``.npz`` of token arrays; None for nothing.
      capacity: tokens that are kept of them, the last ones.
    """

    path: str | None = None
    capacity: int = 4096

    def load(self, partitioner: Partitioner | None = None) -> tuple[None, trie.Store | None]:
        """No model, and the store (whole on every device)."""
        if self.path is None:
            return None, None
        texts = batches.load_pairs(self.path).targets[-self.capacity :]
        rows, lengths = batches.padded(texts)
        store = trie.absorb(trie.empty(self.capacity), jnp.asarray(rows), jnp.asarray(lengths))
        return None, store if partitioner is None else devices.put(store, partitioner.replicated)

    def check(self, model: Network, vocabulary: vocabularies.Base) -> None:
        """Raises ValueError if there are ids that the target does not have."""
        del model
        if self.path is None:
            return
        largest = max(
            (int(x.max(initial=0)) for x in batches.load_pairs(self.path).targets), default=0
        )
        if largest >= vocabulary.size:
            raise ValueError(
                f"{self.path} has ids up to {largest}, the vocabulary {vocabulary.size} pieces"
            )


@dataclasses.dataclass(frozen=True)
class Heads:
    """Medusa's or EAGLE's heads, which work on their target's hidden states.

    Attributes:
      path: what `specjax.pretrained.load` takes. A file may lack what heads take from their target.
      dtype: of activations, caches and weights.
    """

    path: str
    dtype: str = "float32"

    def of(
        self, target: Network, params: PyTree, partitioner: Partitioner | None = None
    ) -> tuple[Network, PyTree]:
        """The heads with what they take from their target, on all devices whole.

        Raises:
          ValueError: there are none, or they are for a target of other sizes.
        """
        path = pretrained.locate(self.path)
        stored = pretrained.described(path, self.dtype)
        if not hasattr(stored, "taken"):
            raise ValueError(f"{self.path} holds no heads but a {type(stored).__name__} of its own")
        found = checkpoints.load_any(path, stored, self.dtype)[1]
        model = stored.beside(target)
        found = found | model.taken(target, params)
        if partitioner is not None:
            return model, devices.put(found, partitioner.replicated)
        return model, model.tile(found) if jax.default_backend() == "cpu" else found


@dataclasses.dataclass(frozen=True)
class Nothing:
    """The draft of a drafter that has no weights."""

    def load(self, partitioner: Partitioner | None = None) -> tuple[None, None]:
        """No model, and nothing."""
        del partitioner
        return None, None

    def check(self, model: Network, vocabulary: vocabularies.Base) -> None:
        """Nothing fits every target."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """A draft with a drafter of its own, for `specjax.drafters.staged.Staged`.

    Attributes:
      draft: the draft.
      drafter: makes what drafts for it, as `load` makes the target's.
      inner: what that decodes with, a `Stages` too where there are more of them.
    """

    draft: Checkpoint
    drafter: Callable[..., Drafter]
    inner: "Draft"

    def of(
        self, model: Network, vocabulary: vocabularies.Base, partitioner: Partitioner | None = None
    ) -> tuple[Network, Drafter, Params]:
        """The draft, what drafts for it, and the weights of both.

        Args:
          model: the target.
          vocabulary: the target's.
          partitioner: where parameters lie; None is one device.

        Returns:
          The draft, its drafter, and `Params` of the draft's weights and its drafter's.

        Raises:
          ValueError: the draft does not have the target's pieces, or the inner one not the draft's.
        """
        small, weights = self.draft.load(partitioner)
        check_same_pieces(vocabulary, model, small, self.draft)
        inner, own = _drafting(small, weights, vocabulary, self.drafter, self.inner, partitioner)
        return small, inner, Params(weights, own)


@dataclasses.dataclass(frozen=True)
class Several:
    """Small models that draft beside each other, for `specjax.drafters.specinfer.SpecInfer`.

    Attributes:
      drafts: at least one, in the order in which what they draft is tried. Neighbours of one architecture
        run as one batch.
    """

    drafts: Sequence[Checkpoint]

    def of(
        self, model: Network, vocabulary: vocabularies.Base, partitioner: Partitioner | None = None
    ) -> tuple[Ensemble, PyTree]:
        """The models as one, and their weights piled up.

        Args:
          model: the target.
          vocabulary: the target's.
          partitioner: where parameters lie; None is one device.

        Raises:
          ValueError: there is none, or one does not have the target's pieces.
        """
        loaded = [draft.load(partitioner) for draft in self.drafts]
        for draft, (small, _) in zip(self.drafts, loaded, strict=True):
            check_same_pieces(vocabulary, model, small, draft)
        ensemble = Ensemble(tuple(small for small, _ in loaded))
        return ensemble, ensemble.stack([weights for _, weights in loaded])


# What a drafter may decode with.
Draft = Checkpoint | Counts | Datastore | Texts | Heads | Nothing | Stages | Several


class System(NamedTuple):
    """Everything that decodes.

    Attributes:
      target: the model whose text comes out.
      drafter: None decodes plainly.
      params: weights of both.
      vocabulary: of both.
    """

    target: Network
    drafter: Drafter | None
    params: Params
    vocabulary: vocabularies.Base


def load(
    target: Checkpoint,
    drafter: Callable[..., Drafter] | None = None,
    draft: Draft | None = None,
    partitioner: Partitioner | None = None,
) -> System:
    """Loads a target and, where a drafter is named, its draft.

    Args:
      target: its weights.
      drafter: makes the drafter; called with ``model=`` the draft if that is a model or `Several`, with
        ``inner=`` too what drafts for it if it is `Stages`, and with ``eos_id=`` what ends the target's texts
        if it copies from them.
      draft: the draft's weights, table or datastore, or the texts it knows; `Nothing` for a drafter that
        has none of these.
      partitioner: where parameters lie; None is one device.

    Raises:
      ValueError: a checkpoint is missing or does not fit, no vocabulary was found, target and draft
        do not have the same pieces, or the mesh does not divide the target's heads.
    """
    model, weights = target.load(partitioner, target=True)
    vocabulary = target.vocabulary()
    if vocabulary is None:
        raise ValueError(
            f"no vocabulary ({' or '.join(vocabularies.SENTENCEPIECE_FILES)}, tokenizer.json) beside "
            f"{target.path}; set vocabulary_path"
        )
    if vocabulary.size > model.vocab_size:
        raise ValueError(
            f"the vocabulary has {vocabulary.size} pieces, the target only {model.vocab_size} rows"
        )
    if drafter is None:
        return System(model, None, Params(weights, None), vocabulary)
    if draft is None:
        raise ValueError(
            "a drafter is named, but not its draft: set DRAFT_CHECKPOINT_PATH, HEADS_PATH or what else its "
            "file in configs/methods asks for"
        )
    made, own = _drafting(model, weights, vocabulary, drafter, draft, partitioner)
    return System(model, made, Params(weights, own), vocabulary)


def _drafting(
    model: Network,
    weights: PyTree,
    vocabulary: vocabularies.Base,
    drafter: Callable[..., Drafter],
    draft: Draft,
    partitioner: Partitioner | None,
) -> tuple[Drafter, Any]:
    """The drafter of a model, and its weights; see `load`."""
    if isinstance(draft, Heads):
        heads, own = draft.of(model, weights, partitioner)
        return drafter(model=heads), own
    if isinstance(draft, Stages):
        small, inner, own = draft.of(model, vocabulary, partitioner)
        return drafter(model=small, inner=inner), own
    if isinstance(draft, Several):
        ensemble, own = draft.of(model, vocabulary, partitioner)
        return drafter(model=ensemble), own
    if not isinstance(draft, Checkpoint):
        draft.check(model, vocabulary)
    small, own = draft.load(partitioner)
    if isinstance(draft, Texts):
        return drafter(eos_id=stopping.end_ids(model)), own
    if small is None:
        return drafter(), own
    check_same_pieces(vocabulary, model, small, draft)
    return drafter(model=small), own


def check_same_pieces(
    vocabulary: vocabularies.Base, model: Network, small: Network, draft: Checkpoint
) -> None:
    """Raises ValueError unless target and draft have the same pieces, not only as many.

    A draft of other pieces drafts other words, whatever its ids say.
    """
    if small.vocab_size != model.vocab_size:
        raise ValueError(
            f"target and draft have {model.vocab_size} and {small.vocab_size} pieces; they must "
            "share a vocabulary"
        )
    width = getattr(small.config, "encoded_dim", None)
    # A draft without an encoder hands the target's output on to what drafts for it.
    given = getattr(model.config, "encoded_dim", None) or model.config.emb_dim
    if width not in (None, given):
        raise ValueError(
            f"the draft reads an encoder output of width {width} (encoded_dim), the target's has {given}"
        )
    theirs = draft.vocabulary()
    if theirs is not None:
        vocabularies.check_same(vocabulary, theirs)
