"""Heads as their authors store them: Medusa's ``medusa_lm_head``, EAGLE-1's and EAGLE-3's folders.

All lack what heads take from their target (`Heads` in `specjax.infer.system` gives it to them). EAGLE's
files may hold the target's embedding as well, which is left where it is. What vLLM and SGLang read is the
same, but for Medusa's heads, whose tensors vLLM names in its own way (``style="vllm"``).

The authors' EAGLE turns positions by a base of 10,000 wherever ``rope_scaling`` is linear or dynamic, and by
``rope_theta`` only without; here, as in their targets, in vLLM and in SGLang, ``rope_theta`` counts always.

References:
  FasterDecoding/Medusa and SafeAILab/EAGLE, released checkpoints; vllm/model_executor/models/{medusa,
  llama_eagle,llama_eagle3}.py and sglang/srt/models/llama_eagle{,3}.py for what is asked for there.
"""

import dataclasses
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
from specjax.models import draft_vocab, layers
from specjax.models.draft_vocab import DraftVocab
from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.llama import LlamaConfig
from specjax.models.medusa import Medusa, MedusaConfig

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
EAGLE_FILES = ("model.safetensors", "pytorch_model.bin")
MAPS = ("d2t", "t2d")
AUTHORS, VLLM = "authors", "vllm"
# Head h: residual block l is h.l.linear, its output layer h.L, where it has L blocks.
_MEDUSA = re.compile(r"^(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
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
    heads, blocks = _counted(folder, shapes)
    for name, stated, found in (
        ("medusa_num_heads", raw.get("medusa_num_heads"), heads),
        ("medusa_num_layers", raw.get("medusa_num_layers"), blocks),
    ):
        if stated is not None and stated != found:
            logging.warning(
                "%s says %s = %s; %s are stored, which count", folder, name, stated, found
            )
    output = shapes.get(f"0.{blocks}.weight")
    width = shapes["0.0.linear.weight"][0]
    if output is None and not isinstance(raw.get("vocab_size"), int):
        raise ValueError(f"{folder}: heads without output layers, and no vocab_size in config.json")
    pieces = output[0] if output is not None else raw["vocab_size"]
    return MedusaConfig(
        pieces, width, heads, blocks, output is not None, _own_vocab(raw), alone=output is None
    )


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
    aside = ("embed_tokens.weight", *(MAPS if isinstance(model, Eagle3) else ()))
    found = {n: tuple(x.shape) for n, x in tensors.items() if n not in aside}
    expected = structure.shapes(model.abstract())
    structure.check(found, {theirs[n]: shape for n, shape in expected.items()}, str(folder))
    reads = {n: (lambda index, n=n: tensors[theirs[n]][index]) for n in expected}
    return place.tree(reads, place.targets(model, dtype, shardings), theirs, str(folder))


def save(
    params: PyTree,
    model: Medusa | Eagle,
    path: str | os.PathLike,
    base: str,
    style: str = AUTHORS,
) -> None:
    """Writes heads as their authors do, in safetensors.

    Args:
      params: of heads; what they take from their target may be among them. Of EAGLE's the embedding is
        written then, as the authors do.
      model: the heads.
      path: the folder; it must hold none yet.
      base: name of the target, for ``base_model_name_or_path``.
      style: "vllm" writes Medusa's heads as vLLM names them, which `load` does not read back.

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
    if style not in (AUTHORS, VLLM):
        raise ValueError(f"style must be {AUTHORS!r} or {VLLM!r}, got {style!r}")
    own_names = medusa and style == VLLM
    some = medusa and model.config.draft_vocab is not None
    if some and model.config.own_output and not own_names:
        raise ValueError(
            "Medusa's own files know no heads that can say only some of the pieces; vLLM's do"
        )
    if own_names and not model.config.own_output and "output" not in params:
        raise ValueError("vLLM wants the output layer that the heads share among the parameters")
    kept = {n: x for n, x in structure.flatten(params).items() if n not in _taken(model)}
    theirs = _vllm_names(model) if own_names else _names(model)
    expected = {
        n: s for n, s in structure.shapes(model.abstract()).items() if n not in _taken(model)
    }
    structure.check({n: tuple(x.shape) for n, x in kept.items()}, expected, "the tree")
    tensors = {theirs[n]: np.ascontiguousarray(np.asarray(x)) for n, x in kept.items()}
    beside = _beside(params, model, own_names)
    tensors |= {n: np.ascontiguousarray(np.asarray(x)) for n, x in beside.items()}
    folder.mkdir(parents=True, exist_ok=True)
    file = MEDUSA_FILES[0] if medusa and not own_names else EAGLE_FILES[0]
    safetensors.numpy.save_file(tensors, folder / file, {"format": "pt"})
    described = _describe_medusa(model, base) if medusa else _describe_eagle(model, base)
    if own_names:
        described |= _vllm_medusa(model)
    folder_of.write_json(folder / folder_of.CONFIG, described)


def _beside(params: PyTree, model: Medusa | Eagle, own_names: bool) -> dict[str, Any]:
    """What stands in a file beside the heads: parts of the target, and which pieces the heads can say."""
    vocab, out = model.config.draft_vocab, {}
    if isinstance(model, Eagle):
        if "embed_tokens" in params:
            out["embed_tokens.weight"] = params["embed_tokens"]["weight"]
        return out | _maps(vocab) if isinstance(model, Eagle3) and vocab is not None else out
    if own_names and not model.config.own_output:
        out["lm_heads.0.weight"] = layers.untile(params["output"]["weight"])
    if own_names and vocab is not None:
        out["token_map"] = vocab.ids.astype(np.int64)
    return out


def _maps(vocab: DraftVocab) -> dict[str, np.ndarray]:
    """EAGLE-3's two maps: what each id of the head must be raised by, and which pieces it has."""
    kept = np.zeros(vocab.vocab_size, bool)
    kept[vocab.ids] = True
    return {"d2t": vocab.ids.astype(np.int64) - np.arange(len(vocab), dtype=np.int64), "t2d": kept}


def _mapped(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], pieces: int
) -> DraftVocab | None:
    """The pieces that an EAGLE-3 head can say.

    Raises:
      ValueError: there is but one map, or both do not say the same of a head that says some pieces.
    """
    found = [tensors.get(name) for name in MAPS]
    if all(x is None for x in found):
        return None
    if any(x is None for x in found):
        raise ValueError(f"{folder}: of {' and '.join(MAPS)} only one is stored")
    raised, kept = found
    # of a head that says all of them the authors ignore what the maps hold
    if len(raised) == pieces:
        return None
    ids = raised.astype(np.int64) + np.arange(len(raised), dtype=np.int64)
    if kept.shape != (pieces,) or not np.array_equal(np.flatnonzero(kept), ids):
        raise ValueError(
            f"{folder}: d2t and t2d disagree: target ids are i + d2t[i], rising, and those that t2d keeps"
        )
    return draft_vocab.of_ids(ids, pieces)


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
            if isinstance(model, Eagle3):
                out[name] = out[name].replace("layers.0.", "midlayer.")
            continue
        first, *rest = name.split(".")
        number, blocks = first.removeprefix("head_"), model.config.layers
        if rest[0] == "output":
            out[name] = f"{number}.{blocks}.weight"
        elif len(rest) == 2:
            out[name] = f"{number}.{rest[0].removeprefix('layer_')}.linear.{rest[1]}"
        else:
            out[name] = name
    return out


def _vllm_names(model: Medusa) -> dict[str, str]:
    """Our dotted names to vLLM's: residual blocks and output layers apart."""
    out = {}
    for name in structure.shapes(model.abstract()):
        head, _, rest = name.removeprefix("head_").partition(".")
        if name == "output.weight":
            continue
        out[name] = f"lm_heads.{head}.weight" if rest == "output.weight" else (
            f"blocks.{head}.layers.{rest.removeprefix('layer_')}"
        )  # fmt: skip
    return out


def _taken(model: Medusa | Eagle) -> tuple[str, ...]:
    """Parameters that are the target's."""
    if isinstance(model, Medusa):
        return () if model.config.own_output else ("output.weight",)
    if isinstance(model, Eagle3):
        return ("embed_tokens.weight",)
    return ("embed_tokens.weight", "lm_head.weight")


def _describe_medusa(model: Medusa, base: str) -> dict[str, Any]:
    c = model.config
    return {
        "model_type": "medusa", "architectures": ["MedusaModel"], "base_model_name_or_path": base,
        "medusa_num_heads": c.heads, "medusa_num_layers": c.layers, "num_heads": c.heads,
        "num_hidden_layers": c.layers, "hidden_size": c.emb_dim, "vocab_size": c.vocab_size,
        "version": "2",
    } | _own(c.draft_vocab)  # fmt: skip


def _vllm_medusa(model: Medusa) -> dict[str, Any]:
    """What vLLM's configuration of Medusa's heads has beside ours."""
    c = model.config
    said = c.vocab_size if c.draft_vocab is None else len(c.draft_vocab)
    return {
        "truncated_vocab_size": said, "medusa_fc_bias": True, "original_lm_head": not c.own_output,
    }  # fmt: skip


def _describe_eagle(model: Eagle, base: str) -> dict[str, Any]:
    c = model.config
    plain = LlamaConfig(**{k: v for k, v in vars(c).items() if k in LlamaConfig.__dataclass_fields__}
                        | {"draft_vocab": None})  # fmt: skip
    said = causal.describe_llama(plain) | {"bias": c.fc_bias, "base_model_name_or_path": base}
    said["qkv_bias"] = c.qkv_bias
    if said["rope_scaling"] is not None:  # as the authors' code asks for it
        said["rope_scaling"] |= {"type": said["rope_scaling"]["rope_type"]}
    if isinstance(c, Eagle3Config):
        said |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": c.vocab_size if c.draft_vocab is None else len(c.draft_vocab),
        }
        return said | _describe_layers(c.reads_layers)
    return said | _own(c.draft_vocab)


def _own(vocab: DraftVocab | None) -> dict[str, Any]:
    """Our own key for what the authors' files have no word for."""
    return {} if vocab is None else {_DRAFT_VOCAB: dataclasses.asdict(vocab)}


def _own_vocab(raw: Mapping[str, Any]) -> DraftVocab | None:
    vocab = raw.get(_DRAFT_VOCAB)
    return None if vocab is None else DraftVocab(**vocab)


def _describe_layers(read: tuple[int, ...] | None) -> dict[str, Any]:
    """Which layers' inputs are read, as vLLM says it; and as SGLang, which counts the outputs before them."""
    if read is None:
        return {}
    said: dict[str, Any] = {_LAYERS: list(read)}
    if min(read) > 0:  # an input of layer 0 is no layer's output
        said["eagle_config"] = {_LAYERS: [i - 1 for i in read]}
    return said


def _layers(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """What `_describe_layers` wrote, or SpecForge and others."""
    if raw.get(_LAYERS) is not None:
        return tuple(raw[_LAYERS])
    outputs = (raw.get("eagle_config") or {}).get(_LAYERS)
    return None if outputs is None else tuple(i + 1 for i in outputs)


def _eagle(folder: pathlib.Path, raw: Mapping[str, Any]) -> EagleConfig:
    found = causal.parse(
        raw | {"model_type": raw.get("model_type", "llama")}, str(folder / folder_of.CONFIG)
    )
    if not isinstance(found, LlamaConfig):
        raise ValueError(f"{folder}: an EAGLE head is a Llama layer, not {type(found).__name__}")
    shapes = _shapes(folder)
    stored = [any(n.endswith(f"self_attn.{x}_proj.bias") for n in shapes) for x in "qo"]
    if raw.get("qkv_bias", stored[0]) != stored[0]:  # the authors' word; they read no other
        raise ValueError(
            f"{folder}: config.json says qkv_bias = {raw['qkv_bias']}, but q_proj.bias is "
            + ("stored" if stored[0] else "missing")
        )
    found = dataclasses.replace(found, qkv_bias=stored[0], out_bias=stored[1])
    bias, third = "fc.bias" in shapes, any(name.startswith("midlayer.") for name in shapes)
    stated = bias if third else raw.get("bias", True)  # the authors' EAGLE-3 does not read it
    if stated != bias:
        raise ValueError(
            f"{folder}: config.json says bias = {stated}, but fc.bias is "
            + ("stored" if bias else "missing")
        )
    if third:
        return _eagle3(folder, raw, found, bias)
    fields = vars(found) | {"draft_vocab": _own_vocab(raw)}
    return EagleConfig(**fields, fc_bias=bias, alone=True)


def _eagle3(
    folder: pathlib.Path, raw: Mapping[str, Any], found: LlamaConfig, bias: bool
) -> Eagle3Config:
    vocab = _mapped(folder, _tensors(folder), found.vocab_size)
    stated, has = raw.get("draft_vocab_size"), found.vocab_size if vocab is None else len(vocab)
    if stated not in (None, has):
        raise ValueError(
            f"{folder}: config.json says draft_vocab_size = {stated}, its maps keep {has}"
        )
    unlike = [n for n in ("norm_before_residual", "norm_before_fc") if raw.get(n)]
    if unlike:
        raise ValueError(
            f"{folder}: config.json says {' and '.join(unlike)}, which no head here has"
        )
    if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ValueError(f"{folder}: the head reads one state of its target (use_aux_hidden_state)")
    width = raw.get("target_hidden_size")
    if width not in (None, found.emb_dim):
        raise ValueError(f"{folder}: the head is {found.emb_dim} wide, its target's states {width}")
    fields = vars(found) | {"draft_vocab": vocab, "tie_embeddings": False, "fc_bias": bias}
    return Eagle3Config(**fields, reads_layers=_layers(raw), alone=True)
