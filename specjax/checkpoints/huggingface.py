"""Reads and writes T5 as Hugging Face stores it: ``config.json`` and safetensors, sharded or not.

T5 v1.0, v1.1, Flan-T5, mT5 and umT5 (one relative bias per layer). Weights are ``[out, in]`` there
as here; only the relative bias is transposed.

What ties the output layer is said in two ways. transformers 4 scales the decoder's output by d^-1/2
where ``tie_word_embeddings`` holds; transformers 5 writes ``scale_decoder_outputs`` for that, and
ties where the file has no output layer of its own. Both are read; mT5 never scales.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import PyTree

from specjax.checkpoints import folder as folder_of
from specjax.checkpoints import place, structure
from specjax.models import stack
from specjax.models.t5 import T5, T5Config

_KINDS = ("t5", "mt5", "umt5")
_FIELDS = {  # T5Config's name to theirs
    "vocab_size": "vocab_size",
    "emb_dim": "d_model",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
    "num_encoder_layers": "num_layers",
}
_OPTIONAL = {
    "relative_buckets": ("relative_attention_num_buckets", 32),
    "max_distance": ("relative_attention_max_distance", 128),
    "norm_eps": ("layer_norm_epsilon", 1e-6),
    "eos_id": ("eos_token_id", 1),
}
# Their "gelu" is the exact one, which no T5 was trained with: it is not served.
_ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "linear": "linear"}
_FEED_FORWARD = {
    ("relu",): "relu",
    ("gelu",): "gelu_new",
    ("linear",): "linear",
    ("gelu", "linear"): "gated-gelu",
    ("relu", "linear"): "gated-relu",
}
_OUTPUT = "lm_head.weight"
# All of these hold the embedding, the first by preference; the others are copies.
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In the first public v1.0 files; no code has ever used it.
_IGNORED = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}
_SUBLAYERS = {
    "encoder": ("attention", "mlp"),
    "decoder": ("self_attention", "encoder_decoder_attention", "mlp"),
}
_NORMS = {
    "pre_attention_layer_norm": "attention",
    "pre_self_attention_layer_norm": "self_attention",
    "pre_cross_attention_layer_norm": "encoder_decoder_attention",
    "pre_mlp_layer_norm": "mlp",
}
_MODULES = {
    "attention": "SelfAttention",
    "self_attention": "SelfAttention",
    "encoder_decoder_attention": "EncDecAttention",
    "mlp": "DenseReluDense",
}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_TRANSPOSED = ".rel_embedding"


def read_config(path: str | os.PathLike) -> T5Config:
    """The configuration in ``config.json``.

    Args:
      path: the folder.

    Returns:
      The configuration, with float32 activations.

    Raises:
      ValueError: no such file, or a model that cannot be served; all that is wrong is said.
    """
    file = pathlib.Path(path).expanduser() / folder_of.CONFIG
    raw = folder_of.read_json(file)
    kind = raw.get("model_type")
    problems = [] if kind in _KINDS else [f"model_type is {kind!r}, not one of {_KINDS}"]
    if absent := [name for name in _FIELDS.values() if not isinstance(raw.get(name), int)]:
        problems.append(f"no integer {', '.join(absent)}")
    for name in ("decoder_start_token_id", "pad_token_id"):
        if raw.get(name) not in (None, 0):
            problems.append(f"{name} is {raw[name]!r}, not 0")
    eos = folder_of.given(raw, "eos_token_id", 1)
    if not isinstance(eos, int):
        problems.append(f"eos_token_id is {eos!r}, not one integer")
    activation, gated = _activation(raw)
    if activation not in _ACTIVATIONS:
        problems.append(f"activation {activation!r} is not one of {sorted(_ACTIVATIONS)}")
    if problems:
        raise ValueError(f"{file} describes no T5 that is known here: {'; '.join(problems)}")
    return T5Config(
        **{ours: raw[theirs] for ours, theirs in _FIELDS.items()},
        **{
            ours: folder_of.given(raw, theirs, default)
            for ours, (theirs, default) in _OPTIONAL.items()
        },
        num_decoder_layers=folder_of.given(raw, "num_decoder_layers", raw["num_layers"]),
        mlp_activations=(_ACTIVATIONS[activation], *(("linear",) if gated else ())),
        logits_via_embedding=_scaled(raw),
        shared_relative_bias=kind != "umt5",
    )


def load(
    path: str | os.PathLike, model: T5, dtype=np.float32, shardings: PyTree | None = None
) -> PyTree:
    """Parameters for ``model``, each put straight where it shall lie.

    Args:
      path: the folder.
      model: its configuration must fit the files.
      dtype: type of the parameters returned, whichever the files have.
      shardings: see `place.targets`.

    Returns:
      The tree that ``model.abstract(dtype)`` describes.

    Raises:
      ValueError: no checkpoint, or missing, unexpected, misshapen tensors, tensors that are no
        floats, or copies of the embedding that differ from it; all of them are named.
    """
    folder = pathlib.Path(path).expanduser()
    wanted = place.targets(model, dtype, shardings)
    tied = folder_of.given(
        folder_of.read_json(folder / folder_of.CONFIG), "tie_word_embeddings", True
    )
    tensors = folder_of.open_tensors(folder)
    names = _sources(model.unrolled.config, tensors, tied)
    _check(folder, model.unrolled.config, names, tensors)
    reads = {name: _reader(tensors[names[name]], name) for name in names}
    return place.tree(reads, wanted, names, str(folder))


def save(
    params: PyTree, model: T5, path: str | os.PathLike, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes ``config.json`` and safetensors that transformers reads too.

    Args:
      params: the parameters, in the type they shall have in the file.
      model: its configuration is written.
      path: the folder; it must hold no model yet.
      max_shard_bytes: a larger model becomes several files and an index; a larger tensor becomes a
        file of its own.

    Raises:
      ValueError: the parameters do not fit the model, transformers has no such model, the folder
        holds one already, or the limit is below 1.
    """
    folder = pathlib.Path(path).expanduser()
    structure.check(structure.shapes(params), structure.shapes(model.abstract()), "the tree")
    params = stack.unpile(params)
    config = _describe(model.config)
    flat = {hf_name(name): (name, x) for name, x in structure.flatten(params).items()}
    tensors = {theirs: x for theirs, (_, x) in flat.items()}
    values = lambda theirs: _turn(np.asarray(flat[theirs][1]), flat[theirs][0])  # noqa: E731
    folder_of.write(folder, config, tensors, max_shard_bytes, values)


def hf_name(name: str) -> str:
    """Their name of one of our parameters."""
    stack, _, rest = name.partition(".")
    if name == "token_embedder.embedding":
        return _EMBEDDINGS[0]
    if name == "decoder.logits_dense.weight":
        return _OUTPUT
    if rest == f"{stack}_norm.scale":
        return f"{stack}.final_layer_norm.weight"
    match = re.fullmatch(r"(?:layers_(\d+)\.)?(\w+)\.(?:(\w+)\.)?\w+", rest)
    layer, part, projection = match.groups()
    at = f"{stack}.block.{layer or 0}.layer"
    if part == "relpos_bias":
        return f"{at}.0.SelfAttention.relative_attention_bias.weight"
    sublayer = _SUBLAYERS[stack].index(_NORMS.get(part, part))
    if part in _NORMS:
        return f"{at}.{sublayer}.layer_norm.weight"
    return f"{at}.{sublayer}.{_MODULES[part]}.{_PROJECTIONS.get(projection, projection)}.weight"


def _sources(config: T5Config, tensors: Mapping[str, Any], tied: bool) -> dict[str, str]:
    """Our name to the name of the tensor that it is read from."""
    names = {name: hf_name(name) for name in structure.shapes(T5(config).abstract())}
    copies = _copies(config)
    embedding = next((name for name in copies if name in tensors), copies[0])
    names["token_embedder.embedding"] = embedding
    # Tied without the factor: the embedding serves as an output layer of its own.
    if tied and not config.logits_via_embedding and _OUTPUT not in tensors:
        names["decoder.logits_dense.weight"] = embedding
    return names


def _copies(config: T5Config) -> tuple[str, ...]:
    return (*_EMBEDDINGS, _OUTPUT) if config.logits_via_embedding else _EMBEDDINGS


def _check(
    folder: pathlib.Path, config: T5Config, names: dict[str, str], tensors: Mapping[str, Any]
) -> None:
    """Everything that is wrong with the files, in one error."""
    expected = {}
    for name, shape in structure.shapes(T5(config).abstract()).items():
        expected[names[name]] = shape[::-1] if name.endswith(_TRANSPOSED) else shape
    embedding = names["token_embedder.embedding"]
    copies = [n for n in _copies(config) if n in tensors and n != embedding]
    skipped = _IGNORED.union(copies)
    found = {n: tuple(x.get_shape()) for n, x in tensors.items() if n not in skipped}
    structure.check(
        found,
        expected,
        str(folder),
        of_no_float_type=[n for n in found if tensors[n].get_dtype() not in folder_of.FLOATS],
        **{
            f"unlike {embedding}": [
                n for n in copies if not folder_of.equal(tensors[n], tensors[embedding])
            ]
        },
    )


def _reader(tensor: Any, name: str) -> place.Read:
    if name.endswith(_TRANSPOSED):
        return lambda index: tensor[index[::-1]].T
    return lambda index: tensor[index]


def _turn(x: np.ndarray, name: str) -> np.ndarray:
    return x.T if name.endswith(_TRANSPOSED) else x


def _activation(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """(activation, whether gated), by transformers' rules."""
    default = "relu" if raw.get("model_type") == "t5" else "gated-gelu"
    form = str(folder_of.given(raw, "feed_forward_proj", default))
    gated, activation = form.startswith("gated-"), form.removeprefix("gated-")
    if form == "gated-gelu":
        activation = "gelu_new"
    return folder_of.given(raw, "dense_act_fn", activation), folder_of.given(
        raw, "is_gated_act", gated
    )


def _scaled(raw: Mapping[str, Any]) -> bool:
    tied = raw["model_type"] != "mt5" and folder_of.given(raw, "tie_word_embeddings", True)
    return bool(folder_of.given(raw, "scale_decoder_outputs", tied))


def _describe(config: T5Config) -> dict[str, Any]:
    """``config.json`` for transformers 4 and 5."""
    if config.mlp_activations not in _FEED_FORWARD:
        raise ValueError(f"Hugging Face has no T5 with activations {config.mlp_activations}")
    if config.encoded_dim is not None:
        raise ValueError("Hugging Face has no T5 that shares another's encoder (encoded_dim)")
    kind = "t5" if config.shared_relative_bias else "umt5"
    form = _FEED_FORWARD[config.mlp_activations]
    return {
        "architectures": [f"{kind.upper()}ForConditionalGeneration"],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _OPTIONAL.items()},
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": form,
        "dense_act_fn": "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-"),
        "is_gated_act": form.startswith("gated-"),
        "tie_word_embeddings": config.logits_via_embedding,
        "scale_decoder_outputs": config.logits_via_embedding,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "is_encoder_decoder": True,
    }
