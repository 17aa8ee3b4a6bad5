"""Heads as their authors store them: Medusa's ``medusa_lm_head`` and EAGLE-1's folders.

Both lack what heads take from their target (`Heads` in `specjax.infer.system` gives it to them). EAGLE's
files may hold the target's embedding as well, which is left where it is.

References:
  FasterDecoding/Medusa and SafeAILab/EAGLE, released checkpoints; see the names in `_MEDUSA` and `_eagle`.
"""

import logging
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from specjax.checkpoints import causal, place, structure, torch_file
from specjax.checkpoints import folder as folder_of
from specjax.models.draft_vocab import DraftVocab
from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.llama import LlamaConfig
from specjax.models.medusa import Medusa, MedusaConfig

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
EAGLE_FILES = ("model.safetensors", "pytorch_model.bin")
# Head h: residual block l is h.l.linear, its output layer h.L, where it has L blocks.
_MEDUSA = re.compile(r"^(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")
# Ours alone: which pieces the head was trained to say. Others skip it, and let the head say all.
_DRAFT_VOCAB = "specjax_draft_vocab"


def recognise(folder: pathlib.Path) -> bool:
    """Whether a folder holds heads."""
    if any((folder / name).is_file() for name in MEDUSA_FILES):
        return True
    if not (folder / folder_of.CONFIG).is_file() or _file(folder, EAGLE_FILES) is None:
        return False
    try:
        return "fc.weight" in _shapes(folder)
    except ValueError:  # another kind of file: other readers say what is wrong with it
        return False


def read_config(path: str | os.PathLike) -> MedusaConfig | EagleConfig:
    """What heads lie in a folder; of Medusa's their tensors say how many there are.

    Raises:
      ValueError: tensors that are no heads, or a configuration that is none.
    """
    folder = pathlib.Path(path).expanduser()
    raw = folder_of.read_json(folder / folder_of.CONFIG)
    if _file(folder, MEDUSA_FILES) is None:
        return _eagle(folder, raw)
    shapes = _shapes(folder)
    heads, layers = _counted(folder, shapes)
    for name, stated, found in (
        ("medusa_num_heads", raw.get("medusa_num_heads"), heads),
        ("medusa_num_layers", raw.get("medusa_num_layers"), layers),
    ):
        if stated is not None and stated != found:
            logging.warning(
                "%s says %s = %s; %s are stored, which count", folder, name, stated, found
            )
    output = shapes.get(f"0.{layers}.weight")
    width = shapes["0.0.linear.weight"][0]
    if output is None and not isinstance(raw.get("vocab_size"), int):
        raise ValueError(f"{folder}: heads without output layers, and no vocab_size in config.json")
    pieces = output[0] if output is not None else raw["vocab_size"]
    return MedusaConfig(pieces, width, heads, layers, output is not None, alone=output is None)


def load(
    path: str | os.PathLike,
    model: Medusa | Eagle,
    dtype: Any = np.float32,
    shardings: PyTree | None = None,
) -> PyTree:
    """Parameters of heads, without what they take from their target.

    Args:
      path: the folder.
      model: what they must fit; its configuration says ``alone`` where it would have more.
      dtype: type of the parameters returned.
      shardings: see `place.targets`.

    Raises:
      ValueError: missing, unexpected or misshapen tensors; all of them are named.
    """
    folder = pathlib.Path(path).expanduser()
    tensors = _tensors(folder)
    theirs = _names(model)
    found = {n: tuple(x.shape) for n, x in tensors.items() if n != "embed_tokens.weight"}
    expected = structure.shapes(model.abstract())
    structure.check(found, {theirs[n]: shape for n, shape in expected.items()}, str(folder))
    reads = {n: (lambda index, n=n: tensors[theirs[n]][index]) for n in expected}
    return place.tree(reads, place.targets(model, dtype, shardings), theirs, str(folder))


def save(params: PyTree, model: Medusa | Eagle, path: str | os.PathLike, base: str) -> None:
    """Writes heads as their authors do, in safetensors.

    Args:
      params: of heads; what they take from their target may be among them. Of EAGLE's the embedding is
        written then, as the authors do.
      model: the heads.
      path: the folder; it must hold none yet.
      base: name of the target, for ``base_model_name_or_path``.

    Raises:
      ValueError: the folder holds heads already, the parameters do not fit, or what the format has no words
        for.
    """
    if not isinstance(model, Medusa | Eagle):
        raise ValueError(
            f"no public format for {type(model).__name__}; keep it with native.save or int8.save"
        )
    folder = pathlib.Path(path).expanduser()
    if old := [n for n in (*MEDUSA_FILES, *EAGLE_FILES) if (folder / n).exists()]:
        raise ValueError(f"{folder} holds {', '.join(old)} already")
    medusa = isinstance(model, Medusa)
    if medusa and model.config.draft_vocab is not None and model.config.own_output:
        raise ValueError("Medusa's files know no heads that can say only some of the pieces")
    kept = {n: x for n, x in structure.flatten(params).items() if n not in _taken(model)}
    theirs = _names(model)
    expected = {
        n: s for n, s in structure.shapes(model.abstract()).items() if n not in _taken(model)
    }
    structure.check({n: tuple(x.shape) for n, x in kept.items()}, expected, "the tree")
    tensors = {theirs[n]: np.ascontiguousarray(np.asarray(x)) for n, x in kept.items()}
    embedding = params.get("embed_tokens")
    if not medusa and embedding is not None:
        tensors["embed_tokens.weight"] = np.ascontiguousarray(np.asarray(embedding["weight"]))
    folder.mkdir(parents=True, exist_ok=True)
    file = MEDUSA_FILES[0] if medusa else EAGLE_FILES[0]
    safetensors.numpy.save_file(tensors, folder / file, {"format": "pt"})
    describe = _describe_medusa if medusa else _describe_eagle
    folder_of.write_json(folder / folder_of.CONFIG, describe(model, base))


def _file(folder: pathlib.Path, names: tuple[str, ...]) -> pathlib.Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    file = _file(folder, MEDUSA_FILES) or _file(folder, EAGLE_FILES)
    if file is None:
        raise ValueError(f"no heads in {folder}: no {', '.join((*MEDUSA_FILES, *EAGLE_FILES))}")
    if file.suffix != ".safetensors":
        return torch_file.load(file)
    try:
        return safetensors.numpy.load_file(file)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from None


def _shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    file = _file(folder, MEDUSA_FILES) or _file(folder, EAGLE_FILES)
    if file.suffix != ".safetensors":
        return {name: x.shape for name, x in torch_file.load(file, values=False).items()}
    opened = folder_of._open_file(file)
    return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _counted(folder: pathlib.Path, shapes: Mapping[str, Any]) -> tuple[int, int]:
    """(heads, residual blocks of each) by the tensors' names."""
    found = [_MEDUSA.match(name) for name in shapes]
    if not shapes or None in found:
        odd = sorted(n for n, m in zip(shapes, found, strict=True) if m is None)
        raise ValueError(
            f"{folder}: no tensors of Medusa's heads: {', '.join(odd) or 'none at all'}"
        )
    blocks = [int(m[2]) for m in found if m[3] == "linear.weight"]
    if not blocks or (0, 0) not in {(int(m[1]), int(m[2])) for m in found}:
        raise ValueError(f"{folder}: head 0 has no residual block")
    return 1 + max(int(m[1]) for m in found), 1 + max(blocks)


def _names(model: Medusa | Eagle) -> dict[str, str]:
    """Our dotted names to theirs."""
    out = {}
    for name in structure.shapes(model.abstract()):
        if isinstance(model, Eagle):
            out[name] = causal._inner(name)
            continue
        first, *rest = name.split(".")
        number, layers = first.removeprefix("head_"), model.config.layers
        if rest[0] == "output":
            out[name] = f"{number}.{layers}.weight"
        elif len(rest) == 2:
            out[name] = f"{number}.{rest[0].removeprefix('layer_')}.linear.{rest[1]}"
        else:
            out[name] = name
    return out


def _taken(model: Medusa | Eagle) -> tuple[str, ...]:
    """Parameters that are the target's."""
    if isinstance(model, Medusa):
        return () if model.config.own_output else ("output.weight",)
    return ("embed_tokens.weight", "lm_head.weight")


def _describe_medusa(model: Medusa, base: str) -> dict[str, Any]:
    c = model.config
    return {
        "model_type": "medusa", "architectures": ["MedusaModel"], "base_model_name_or_path": base,
        "medusa_num_heads": c.heads, "medusa_num_layers": c.layers, "num_heads": c.heads,
        "num_hidden_layers": c.layers, "hidden_size": c.emb_dim, "vocab_size": c.vocab_size,
        "version": "2",
    }  # fmt: skip


def _describe_eagle(model: Eagle, base: str) -> dict[str, Any]:
    c = model.config
    plain = LlamaConfig(**{k: v for k, v in vars(c).items() if k in LlamaConfig.__dataclass_fields__}
                        | {"draft_vocab": None})  # fmt: skip
    said = causal.describe_llama(plain) | {"bias": c.fc_bias, "base_model_name_or_path": base}
    if c.draft_vocab is not None:
        said[_DRAFT_VOCAB] = {"mask": c.draft_vocab.mask, "vocab_size": c.draft_vocab.vocab_size}
    return said


def _eagle(folder: pathlib.Path, raw: Mapping[str, Any]) -> EagleConfig:
    found = causal.parse(
        raw | {"model_type": raw.get("model_type", "llama")}, str(folder / folder_of.CONFIG)
    )
    if not isinstance(found, LlamaConfig):
        raise ValueError(f"{folder}: an EAGLE head is a Llama layer, not {type(found).__name__}")
    bias = "fc.bias" in _shapes(folder)
    if raw.get("bias", True) != bias:
        raise ValueError(
            f"{folder}: config.json says bias = {raw.get('bias', True)}, but fc.bias is "
            + ("stored" if bias else "missing")
        )
    vocab = raw.get(_DRAFT_VOCAB)
    fields = vars(found) | {"draft_vocab": None if vocab is None else DraftVocab(**vocab)}
    return EagleConfig(**fields, fc_bias=bias, alone=True)
