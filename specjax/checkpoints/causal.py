"""Reads and writes decoder-only models as Hugging Face stores them: Llama, Mistral, Qwen2, OPT.

Weights are ``[out, in]`` there as here, and parameters have their names, without the prefix ``model.``
(which some public files lack too). The rotary order is theirs: pairs (i, i + D/2).
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
from specjax.checkpoints.folder import given
from specjax.models import stack
from specjax.models.llama import ACTIVATIONS, Llama, LlamaConfig, Rope
from specjax.models.opt import Opt, OptConfig

KINDS = ("llama", "mistral", "qwen2", "opt")
_OUTPUT, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Old files hold what is computed from the configuration.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
# What the scaling of rotary positions must say, by its kind.
_SCALING = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


def read_config(path: str | os.PathLike) -> LlamaConfig | OptConfig:
    """The configuration in ``config.json``; ids that end a text also from ``generation_config.json``.

    Args:
      path: the folder.

    Returns:
      The configuration, with float32 activations.

    Raises:
      ValueError: no such file, or a model that cannot be served; all that is wrong is said.
    """
    folder = pathlib.Path(path).expanduser()
    file = folder / folder_of.CONFIG
    raw = folder_of.read_json(file)
    more = folder / "generation_config.json"
    ends = _ids(folder_of.read_json(more).get("eos_token_id")) if more.is_file() else ()
    return parse(raw, str(file), ends)


def parse(
    raw: Mapping[str, Any], where: str, ends: tuple[int, ...] = ()
) -> LlamaConfig | OptConfig:
    """The configuration that a ``config.json`` says.

    Args:
      raw: its content.
      where: the file, for the message.
      ends: further ids that end a text.

    Raises:
      ValueError: a model that cannot be served; all that is wrong is said.
    """
    kind = raw.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"{where}: model_type is {kind!r}, not one of {', '.join(KINDS)}")
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    needed.append("ffn_dim" if kind == "opt" else "intermediate_size")
    problems = [f"no integer {n}" for n in needed if not isinstance(raw.get(n), int)]
    if not problems:
        problems = _opt_problems(raw) if kind == "opt" else _llama_problems(raw)
    if problems:
        raise ValueError(f"{where} describes no {kind} that can be served: {'; '.join(problems)}")
    try:
        return _opt(raw) if kind == "opt" else _llama(raw, ends)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def load(
    path: str | os.PathLike,
    model: Llama | Opt,
    dtype: Any = np.float32,
    shardings: PyTree | None = None,
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
      ValueError: no checkpoint, or missing, unexpected, misshapen tensors, or tensors that are no
        floats; all of them are named.
    """
    folder = pathlib.Path(path).expanduser()
    return from_tensors(folder_of.open_tensors(folder), model, dtype, shardings, str(folder))


def from_tensors(
    tensors: Mapping[str, Any],
    model: Llama | Opt,
    dtype: Any = np.float32,
    shardings: PyTree | None = None,
    where: str = "the checkpoint",
) -> PyTree:
    """The same from lazy tensors under Hugging Face's names.

    Args:
      tensors: name to something with ``get_shape``, ``get_dtype`` and slicing.
      model, dtype, shardings: see `load`.
      where: for messages.
    """
    wanted = place.targets(model, dtype, shardings)
    theirs = {_bare(name): name for name in tensors}
    expected = structure.shapes(model.unrolled.abstract())
    names = {ours: _inner(ours) for ours in expected}
    tied = _OUTPUT not in expected
    found = {
        name: tuple(tensors[full].get_shape())
        for name, full in theirs.items()
        if not _COMPUTED.search(name) and not (tied and name == _OUTPUT)
    }
    whole = {names[ours]: shape for ours, shape in expected.items()}
    no_floats = [n for n in found if tensors[theirs[n]].get_dtype() not in folder_of.FLOATS]
    twice = [n for n in tensors if theirs[_bare(n)] != n]
    also = _unlike(tensors, theirs, tied) | {"there_twice": twice}
    structure.check(found, whole, where, of_no_float_type=no_floats, **also)
    reads = {ours: _reader(tensors[theirs[inner]]) for ours, inner in names.items()}
    return place.tree(reads, wanted, {o: theirs[i] for o, i in names.items()}, where)


def save(
    params: PyTree, model: Llama | Opt, path: str | os.PathLike, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes ``config.json`` and safetensors that transformers reads too.

    Args:
      params: the parameters, in the type they shall have in the file.
      model: its configuration is written.
      path: the folder; it must hold no model yet.
      max_shard_bytes: see `folder.write`.

    Raises:
      ValueError: the parameters do not fit the model, the folder holds one already, or the limit is
        below 1.
    """
    structure.check(structure.shapes(params), structure.shapes(model.abstract()), "the tree")
    prefix = "model.decoder." if isinstance(model, Opt) else "model."
    flat = structure.flatten(stack.unpile(params))
    named = {n if n == _OUTPUT else prefix + _inner(n): x for n, x in flat.items()}
    folder = pathlib.Path(path).expanduser()
    values = lambda name: np.asarray(named[name])  # noqa: E731
    folder_of.write(folder, describe(model), named, max_shard_bytes, values)


def describe(model: Llama | Opt) -> dict[str, Any]:
    """``config.json`` for transformers 4 and 5.

    Raises:
      ValueError: a model that its configuration has no words for.
    """
    c = model.config
    if problem := _unspeakable(model):
        raise ValueError(f"Hugging Face has no {problem}")
    if isinstance(model, Opt):
        return {
            "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
            "hidden_size": c.emb_dim, "word_embed_proj_dim": c.word_dim, "ffn_dim": c.mlp_dim,
            "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
            "vocab_size": c.vocab_size, "max_position_embeddings": c.max_positions,
            "do_layer_norm_before": c.norm_first, "enable_bias": True, "tie_word_embeddings": True,
            "bos_token_id": c.bos_id, "eos_token_id": c.eos_id, "pad_token_id": c.pad_id,
        }  # fmt: skip
    return describe_llama(c)


def describe_llama(c: LlamaConfig) -> dict[str, Any]:
    """The same of a Llama's configuration."""
    kind = "qwen2" if c.qkv_bias and not c.out_bias else "llama"
    ends = [c.eos_id, *c.other_eos_ids]
    return {
        "architectures": ["Qwen2ForCausalLM" if kind == "qwen2" else "LlamaForCausalLM"],
        "model_type": kind, "hidden_act": c.activation, "hidden_size": c.emb_dim,
        "intermediate_size": c.mlp_dim, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim, "vocab_size": c.vocab_size, "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta, "rope_scaling": _describe_rope(c.rope),
        "max_position_embeddings": c.max_positions, "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias, "bos_token_id": c.bos_id,
        "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": c.pad_id,
    }  # fmt: skip


def _unspeakable(model: Llama | Opt) -> str | None:
    """What of a model would be lost in ``config.json``."""
    c = model.config
    if isinstance(model, Opt):
        return None if c.norm_eps == 1e-5 else f"OPT with norm_eps {c.norm_eps}, only with 1e-05"
    if c.draft_vocab is not None:
        return "Llama that knows only some of the pieces"
    if c.out_bias and not c.qkv_bias:
        return "Llama with a bias on the output projection alone"
    if c.mlp_bias and c.qkv_bias and not c.out_bias:
        return "Qwen2 with biases in its feed-forward layers"
    if c.rope.kind == "dynamic" and c.rope.original_max_positions != c.max_positions:
        return "dynamic scaling that begins elsewhere than at max_positions"
    return None


def _llama_problems(raw: Mapping[str, Any]) -> list[str]:
    kind, problems = raw["model_type"], []
    activation = given(raw, "hidden_act", "silu")
    if _ACTIVATIONS.get(activation) not in ACTIVATIONS:
        problems.append(
            f"activation {activation!r} is not one of {', '.join(sorted(_ACTIVATIONS))}"
        )
    windowed = kind == "mistral" or given(raw, "use_sliding_window", False)
    window = raw.get("sliding_window", 4096)  # as transformers has it where nothing is said
    if windowed and window is not None:
        problems.append(f"attention in a sliding window of {window} is not supported")
    scaling = _scaling(raw)
    scaled = given(scaling, "rope_type", scaling.get("type"))
    lacking = [name for name in _SCALING.get(scaled, ()) if scaling.get(name) is None]
    problems += [f"rotary scaling {scaled!r} has no {name}" for name in lacking]
    if not _ids(raw.get("eos_token_id", 2)):
        problems.append(f"eos_token_id is {raw.get('eos_token_id')!r}, not an id or several")
    return problems


def _scaling(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry on rotary positions, of transformers 4 or 5."""
    return given(raw, "rope_parameters", given(raw, "rope_scaling", {}))


def _llama(raw: Mapping[str, Any], ends: tuple[int, ...]) -> LlamaConfig:
    heads, kind = raw["num_attention_heads"], raw["model_type"]
    eos, *others = dict.fromkeys((*_ids(raw.get("eos_token_id", 2)), *ends))
    biased = bool(given(raw, "attention_bias", False))
    scaling = _scaling(raw)
    longest = given(raw, "max_position_embeddings", 2048)
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        emb_dim=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=given(raw, "num_key_value_heads", heads),
        head_dim=given(raw, "head_dim", raw["hidden_size"] // heads),
        mlp_dim=raw["intermediate_size"],
        activation=_ACTIVATIONS[given(raw, "hidden_act", "silu")],
        rope_theta=float(given(scaling, "rope_theta", given(raw, "rope_theta", 10000.0))),
        rope=_rope(scaling, longest),
        tie_embeddings=bool(given(raw, "tie_word_embeddings", False)),
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased and kind != "qwen2",
        mlp_bias=bool(given(raw, "mlp_bias", False)),
        norm_eps=float(given(raw, "rms_norm_eps", 1e-6)),
        max_positions=longest,
        bos_id=raw.get("bos_token_id"),
        eos_id=eos,
        pad_id=given(raw, "pad_token_id", 0),
        other_eos_ids=tuple(others),
    )


def _rope(raw: Mapping[str, Any], longest: int) -> Rope:
    """Scaling, in the words of transformers 4 (``type``) and 5 (``rope_type``)."""
    kind = given(raw, "rope_type", given(raw, "type", "default"))
    # dynamic scaling begins at max_position_embeddings, whatever else is said
    original = raw.get("original_max_position_embeddings") if kind == "llama3" else None
    return Rope(
        kind,
        float(given(raw, "factor", 1.0)),
        float(given(raw, "low_freq_factor", 1.0)),
        float(given(raw, "high_freq_factor", 4.0)),
        int(longest if original is None else original),
    )


def _describe_rope(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    out = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        out |= {"original_max_position_embeddings": rope.original_max_positions}
    return out


def _opt_problems(raw: Mapping[str, Any]) -> list[str]:
    problems = []
    if (name := given(raw, "activation_function", "relu")) != "relu":
        problems.append(f"activation_function {name!r} is not 'relu'")
    for name in ("enable_bias", "layer_norm_elementwise_affine", "tie_word_embeddings"):
        if not given(raw, name, True):
            problems.append(f"{name} is false")
    if given(raw, "_remove_final_layer_norm", False):
        problems.append("its final layer norm was removed")
    if len(_ids(given(raw, "eos_token_id", 2))) != 1:
        problems.append(f"eos_token_id is {raw['eos_token_id']!r}, not one id")
    return problems


def _opt(raw: Mapping[str, Any]) -> OptConfig:
    return OptConfig(
        vocab_size=raw["vocab_size"],
        emb_dim=raw["hidden_size"],
        word_dim=given(raw, "word_embed_proj_dim", raw["hidden_size"]),
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        mlp_dim=raw["ffn_dim"],
        norm_first=bool(given(raw, "do_layer_norm_before", True)),
        max_positions=given(raw, "max_position_embeddings", 2048),
        bos_id=given(raw, "bos_token_id", 2),
        eos_id=_ids(given(raw, "eos_token_id", 2))[0],
        pad_id=given(raw, "pad_token_id", 1),
    )


def _ids(value: Any) -> tuple[int, ...]:
    """One id or several; none for anything else."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(values) if all(type(v) is int for v in values) else ()


def _bare(name: str) -> str:
    """A tensor's name without the prefixes that not all files have."""
    return name.removeprefix("model.").removeprefix("decoder.")


def _inner(name: str) -> str:
    """Their name, bare, of one of our parameters."""
    return re.sub(r"^layers_(\d+)\.", r"layers.\1.", name)


def _reader(tensor: Any) -> place.Read:
    return lambda index: tensor[index]


def _unlike(tensors: Mapping[str, Any], theirs: Mapping[str, str], tied: bool) -> dict[str, list]:
    """An output layer in the file of a tied model must be the embedding."""
    if not tied or _OUTPUT not in theirs or _EMBEDDING not in theirs:
        return {}
    same = folder_of.equal(tensors[theirs[_OUTPUT]], tensors[theirs[_EMBEDDING]])
    return {} if same else {"unlike the embedding, though tied": [_OUTPUT]}


def kind(path: pathlib.Path) -> str | None:
    """The ``model_type`` of a folder's ``config.json``."""
    return folder_of.read_json(path / folder_of.CONFIG).get("model_type")
