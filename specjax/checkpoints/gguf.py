"""Reads Llama and Qwen2 models from GGUF, llama.cpp's file format, quantised or not.

One file holds the configuration, the vocabulary and the weights. They are given here as Hugging
Face has them: a ``config.json`` dict, tensors under transformers' names and in its order of rows.
The header is read here, since the ``gguf`` package's own reader takes seconds for a vocabulary and
names no tensor in its errors; that package knows the quantised types.

References:
  The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names, and the order of the
  query's and key's rows: llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import pathlib
import re
import struct
import types
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

ARCHITECTURES = ("llama", "qwen2")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {  # by the number that says a value's type
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
# Anything but these values would make it another model than transformers' Llama.
_REFUSED = ("expert_count", "attention.scale", "logit_scale", "embedding_scale", "residual_scale")
# What llama.cpp adds a BOS to where the file does not say.
_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe")


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor in the file. Only the part that is asked for is read, and made float32.

    Attributes:
      name: as the file calls it.
      kind: a ``gguf.GGMLQuantizationType``.
      shape: transformers' shape: ``[rows, columns]``, or ``[columns]``.
      data: uint8 ``[rows, bytes of a row]``, in the file.
      heads: how many heads the rows hold whose halves llama.cpp has interleaved; 0 for none.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    data: UInt8[np.ndarray, "rows bytes"]
    heads: int = 0

    def get_shape(self) -> list[int]:
        """The shape, as a slice of safetensors gives it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type of what is read: float32, whatever the file holds."""
        return "F32"

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """A part, one slice per axis; axes that are left out are read whole."""
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        if len(self.shape) == 1:
            whole = self._columns(self.data, slice(None))[0]
            return np.ascontiguousarray(whole[_unpermuted(len(whole), self.heads)][index[0]])
        order = _unpermuted(self.shape[0], self.heads)
        rows = self.data[index[0]] if self.heads == 0 else self.data[order[index[0]]]
        return np.ascontiguousarray(self._columns(rows, index[1]))

    def _columns(self, rows: UInt8[np.ndarray, "r bytes"], part: slice) -> np.ndarray:
        """Columns of rows; only the blocks that hold them are dequantised."""
        library = _library()
        block, size = library.GGML_QUANT_SIZES[self.kind]
        start, stop, step = part.indices(self.shape[-1])
        if step != 1:
            return self._columns(rows, slice(None))[:, part]
        if not len(rows) or start >= stop:  # which the library does not take
            return np.zeros((len(rows), max(0, stop - start)), np.float32)
        first, last = start // block, -(-stop // block)
        values = library.quants.dequantize(rows[:, first * size : last * size], self.kind)
        values = values[:, start - first * block : stop - first * block]
        # Of float32 these are the file's own bytes, which must not be handed out.
        return values.copy() if self.kind == library.GGMLQuantizationType.F32 else values


class Vocabulary(NamedTuple):
    """What a tokenizer is made of.

    Attributes:
      model: kind of tokenizer, e.g. ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece's BPE).
      pre: how text is split before BPE, e.g. ``smollm``; ``default`` where the file does not say.
      pieces: by id.
      types: of each piece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
      scores: of each piece; empty for ``gpt2``.
      merges: pairs of pieces, the first to be merged first; empty for ``llama``.
      bos_id: begins a text; None where there is none.
      eos_ids: each of these ends a text; the first is the one to write.
      pad_id: None where there is none.
      unk_id: None where there is none.
      add_bos: whether a prompt begins with BOS.
      add_space_prefix: whether a space is put before a text (for ``llama``).
      chat_template: Jinja source, or None.
    """

    model: str
    pre: str
    pieces: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_space_prefix: bool
    chat_template: str | None


class _Info(NamedTuple):
    """A tensor in the header: type, shape with the rows first, offset behind the header."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class _File(NamedTuple):
    """A header that was read, and the file's bytes."""

    path: str
    metadata: dict[str, Any]
    infos: dict[str, _Info]
    start: int
    data: UInt8[np.ndarray, " size"]


def describe(path: str | os.PathLike) -> dict[str, Any]:
    """The model, as its ``config.json`` would have it; no weights are read.

    Factors of the rotary frequencies (``rope_freqs.weight``) become the ``rope_scaling`` of kind
    ``llama3`` that they were made from.

    Args:
      path: the file.

    Returns:
      Entries of a ``config.json``: model_type, sizes, rotary embedding, special ids, biases.

    Raises:
      ValueError: no GGUF file, a damaged header, another architecture, or a model that transformers'
        Llama and Qwen2 are not; all that is wrong is said.
    """
    file = _read(path)
    kind = _architecture(file)
    get = functools.partial(_of_model, file)
    _check_model(file)
    heads = get("attention.head_count")
    hidden = get("embedding_length")
    words = vocabulary(path) if "tokenizer.ggml.tokens" in file.metadata else None
    config = {
        "model_type": kind,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]],
        "vocab_size": file.infos["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": _head_dim(file),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": get("context_length"),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in file.infos,
        "attention_bias": "blk.0.attn_q.bias" in file.infos,
        "mlp_bias": "blk.0.ffn_up.bias" in file.infos,
        "bos_token_id": words.bos_id if words else None,
        "eos_token_id": words.eos_ids[0] if words and words.eos_ids else None,
        "pad_token_id": words.pad_id if words else None,
    }
    if window := get("attention.sliding_window", 0):
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config


def tensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """All weights by transformers' names, each read when it is sliced.

    The rows of a Llama's q_proj and k_proj come back in transformers' order, in which the halves of
    a head are rotated against each other; llama.cpp interleaves them.

    Args:
      path: the file.

    Returns:
      Name to lazy tensor, in the file's order.

    Raises:
      ValueError: the ``gguf`` package is missing, as `describe`, or the file is truncated or holds
        tensors of an unknown name, shape or type; all of them are named.
    """
    library = _library()
    file = _read(path)
    kind = _architecture(file)
    heads = {}
    if kind == "llama":
        heads["attn_q"] = _of_model(file, "attention.head_count")
        heads["attn_k"] = _of_model(file, "attention.head_count_kv", heads["attn_q"])
    _check_tensors(file, heads, library)
    out = {}
    for name, info in file.infos.items():
        if _IGNORED.fullmatch(name):
            continue
        part = _part(name)
        start, size = file.start + info.offset, _bytes(info, library)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        data = file.data[start : start + size].reshape(rows, -1)
        kind = library.GGMLQuantizationType(info.kind)
        out[_hf_name(name)] = Tensor(name, kind, info.shape, data, heads.get(part, 0))
    return out


def vocabulary(path: str | os.PathLike) -> Vocabulary:
    """What the file says of its tokenizer.

    Args:
      path: the file; of any architecture.

    Returns:
      Pieces, merges and special ids.

    Raises:
      ValueError: no GGUF file, a damaged header, no vocabulary in it, or one that contradicts
        itself.
    """
    file = _read(path)
    get = functools.partial(_entry, file, "tokenizer.ggml.")
    pieces, model, pre = get("tokens"), get("model"), get("pre", "default")
    kinds, scores = get("token_type", [1] * len(pieces)), get("scores", [])
    merges = get("merges", [])
    # SentencePiece's ids of special tokens hold where a file of its kind does not say.
    bos, eos, unknown = (1, 2, 0) if model == "llama" else (None, None, None)
    ends = [get("eos_token_id", eos), get("eot_token_id", None), get("eom_token_id", None)]
    words = Vocabulary(
        model=model,
        pre=pre,
        pieces=tuple(pieces),
        types=tuple(kinds),
        scores=tuple(scores),
        merges=tuple(_pair(merge) for merge in merges),
        bos_id=get("bos_token_id", bos),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        pad_id=get("padding_token_id", None),
        unk_id=get("unknown_token_id", unknown),
        add_bos=get("add_bos_token", model == "llama" or pre in _BOS_BY_DEFAULT),
        add_space_prefix=get("add_space_prefix", model == "llama"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )
    _check_words(file, words)
    return words


def _check_words(file: _File, words: Vocabulary) -> None:
    size = len(words.pieces)
    special = {words.bos_id, *words.eos_ids, words.pad_id, words.unk_id} - {None}
    problems = [f"no piece has id {i}" for i in sorted(special) if not 0 <= i < size]
    counts = {"types": len(words.types), "scores": len(words.scores) or size}
    problems += [f"{n} {name} for {size} pieces" for name, n in counts.items() if n != size]
    problems += [f"the merge {a!r} has one side" for a, b in words.merges if not b]
    if problems:
        raise ValueError(f"{file.path} has a damaged vocabulary: {'; '.join(problems)}")


def _library() -> types.ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ValueError(
            f"weights in GGUF need the package gguf: pip install gguf ({error})"
        ) from None
    return gguf


def _hf_name(name: str) -> str | None:
    """transformers' name of one of llama.cpp's, or None."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _IN_A_LAYER:
        return _OUTSIDE.get(name)
    return f"model.layers.{match[1]}.{_IN_A_LAYER[match[2]]}.{match[3]}"


def _part(name: str) -> str:
    """Of ``blk.7.attn_q.weight`` it is ``attn_q``."""
    return name.split(".")[-2]


def _unpermuted(rows: int, heads: int) -> Int[np.ndarray, " rows"]:
    """Where transformers' rows lie in the file: row 2i + j of a head is its half j's row i there."""
    order = np.arange(rows)
    if heads == 0:
        return order
    return order.reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _bytes(info: _Info, library: types.ModuleType) -> int:
    block, size = library.GGML_QUANT_SIZES[info.kind]
    return math.prod(info.shape) // block * size


# What is wrong with a model.


def _architecture(file: _File) -> str:
    kind = _entry(file, "general.", "architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{file.path} holds a {kind!r}, which is none of {ARCHITECTURES}")
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{file.path} is one of {parts} parts: merge them by llama-gguf-split")
    return kind


def _check_model(file: _File) -> None:
    """Refuses what no configuration of transformers' Llama or Qwen2 says."""
    get = functools.partial(_of_model, file)
    problems = [f"{name} is {get(name)}" for name in _REFUSED if get(name, 0)]
    names = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
    problems += [f"{name} differs by layer" for name in names if isinstance(get(name, 0), list)]
    if not problems:
        size = _head_dim(file)
        names = "rope.dimension_count", "attention.key_length", "attention.value_length"
        problems += [f"{n} is {get(n)}, not {size}" for n in names if get(n, size) != size]
    if "token_embd.weight" not in file.infos:
        problems.append("there is no token_embd.weight")
    if problems:
        raise ValueError(f"{file.path} holds a model that is not served: {'; '.join(problems)}")


def _check_tensors(file: _File, heads: dict[str, int], library: types.ModuleType) -> None:
    """Everything that is wrong with the tensors, in one error."""
    problems = collections.defaultdict(list)
    for name, info in sorted(file.infos.items(), key=lambda item: item[1].offset):
        if _IGNORED.fullmatch(name):
            continue
        if _hf_name(name) is None:
            problems["unexpected"].append(name)
        elif not _is_known(info.kind):
            problems["unknown type"].append(f"{name} is {_type_name(info.kind, library)}")
        elif info.shape[-1] % library.GGML_QUANT_SIZES[info.kind][0] or len(info.shape) > 2:
            problems["bad shape"].append(f"{name} is {_type_name(info.kind, library)} {info.shape}")
        elif info.shape[0] % (2 * heads.get(_part(name), 0) or 1):
            problems["bad shape"].append(f"{name} is {info.shape}, of {heads[_part(name)]} heads")
        elif not problems["truncated"]:
            end = file.start + info.offset + _bytes(info, library)
            if end > file.data.size:
                problems["truncated"].append(f"{name} ends at byte {end} of {file.data.size}")
    parts = [f"{label}: {', '.join(found)}" for label, found in problems.items() if found]
    if parts:
        raise ValueError(f"{file.path} cannot be read; {'; '.join(parts)}")


@functools.cache
def _is_known(kind: int) -> bool:
    """Whether the library has both the type and its way back to float32."""
    library = _library()
    try:
        kind = library.GGMLQuantizationType(kind)
        block = np.zeros((1, library.GGML_QUANT_SIZES[kind][1]), np.uint8)
        library.quants.dequantize(block, kind)
    except (ValueError, NotImplementedError):
        return False
    return True


def _type_name(kind: int, library: types.ModuleType) -> str:
    known = {int(k): k.name for k in library.GGMLQuantizationType}
    return known.get(kind, f"type {kind}")


# Entries of the configuration.


def _entry(file: _File, prefix: str, name: str, *default: Any) -> Any:
    if prefix + name in file.metadata:
        return file.metadata[prefix + name]
    if not default:
        raise ValueError(f"{file.path} has no {prefix}{name}")
    return default[0]


def _of_model(file: _File, name: str, *default: Any) -> Any:
    return _entry(file, f"{file.metadata['general.architecture']}.", name, *default)


def _head_dim(file: _File) -> int:
    rotated = _of_model(file, "rope.dimension_count", None)
    equal = _of_model(file, "embedding_length") // _of_model(file, "attention.head_count")
    return _of_model(file, "attention.key_length", rotated or equal)


def _shortest(x: float) -> float:
    """A float32 as one would write it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def _rope_scaling(file: _File) -> dict[str, Any] | None:
    """transformers' ``rope_scaling``, from the entries or from the factors of the frequencies."""
    get = functools.partial(_of_model, file)
    if _ROPE_FACTORS in file.infos:
        return _llama3(file)
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    config = {"rope_type": kind, "factor": _shortest(factor)}
    original = get("rope.scaling.original_context_length", None)
    return config | ({} if original is None else {"original_max_position_embeddings": original})


def _llama3(file: _File) -> dict[str, Any] | None:
    """The scaling that gives the factors in the file.

    Frequencies of short waves keep theirs (factor 1), those of long waves are divided by the
    largest; between the two wave lengths L / high and L / low, 1 / factor goes linearly with
    L / wave length. Only the two are in the numbers, so low is 1, as every Llama 3 has it.
    """
    info = file.infos[_ROPE_FACTORS]
    at = file.start + info.offset
    data = file.data[at : at + 4 * math.prod(info.shape)]
    if info.kind != 0 or data.size != 4 * math.prod(info.shape):
        raise ValueError(f"{file.path} is truncated or damaged: {_ROPE_FACTORS}")
    factors = data.view("<f4").astype(np.float64)
    if (factors == 1).all():
        return None
    size, theta = _head_dim(file), _of_model(file, "rope.freq_base", 10000.0)
    inverse = theta ** (-np.arange(0, size, 2) / size) / (2 * np.pi)  # of the wave length
    guess = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), **guess}
    found = factors.size == inverse.size
    if found and not _gives(scaling, inverse, factors):
        scaling |= _fitted(factors, inverse)
        found = _gives(scaling, inverse, factors)
    if not found:
        raise ValueError(f"{file.path}: {_ROPE_FACTORS} is no scaling of Llama 3")
    return scaling


def _fitted(factors: Float[np.ndarray, " n"], inverse: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """Length and factor of short waves from the line between both ends; empty if it has no two points."""
    largest = factors.max()
    smooth = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() < 2:
        return {}
    slope, start = np.polyfit(inverse[between], smooth[between], 1)
    return {
        "original_max_position_embeddings": round(-slope / start),
        "high_freq_factor": round(float(1 - 1 / start), 2),
    }


def _gives(
    scaling: dict[str, Any], inverse: Float[np.ndarray, " n"], factors: Float[np.ndarray, " n"]
) -> bool:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.allclose(1 / factors, (1 - smooth) / scaling["factor"] + smooth, rtol=1e-4)


def _pair(merge: str) -> tuple[str, str]:
    """Both sides of a merge; the first may begin with a space."""
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


# The header.


class _Cursor:
    """Reads a header's values one after the other."""

    def __init__(self, data: UInt8[np.ndarray, " size"]):
        self.data = memoryview(data)
        self.at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise ValueError("truncated")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return bytes(self.take(self.number("<Q"))).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
            if kind in _NUMBERS:
                return self._numbers(kind, count)
            return [self.value(kind) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}, which is not known")
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def info(self) -> _Info:
        rank = self.number("<I")
        shape = struct.unpack(f"<{rank}Q", self.take(8 * rank))
        # The axis that lies densely comes first there and last here.
        return _Info(self.number("<I"), shape[::-1], self.number("<Q"))


def _read(path: str | os.PathLike) -> _File:
    place = pathlib.Path(path).expanduser()
    if not place.is_file():
        raise ValueError(f"no GGUF file at {place}")
    stat = place.stat()
    return _read_once(str(place), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)  # target and draft, each asked for configuration, words and weights
def _read_once(path: str, mtime: int, size: int) -> _File:
    """Reads a header; the other arguments tell a file from another that has taken its place."""
    data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    data = np.asarray(data)
    if bytes(data[:4]) != _MAGIC:
        raise ValueError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
    cursor = _Cursor(data[4:])
    metadata, infos, last = {}, {}, "the version"
    try:
        if (version := cursor.number("<I")) not in _VERSIONS:
            raise ValueError(f"version {version} is not known (or the file is big-endian)")
        counts = cursor.number("<Q"), cursor.number("<Q")
        for _ in range(counts[1]):
            last = cursor.text()
            metadata[last] = cursor.value(cursor.number("<I"))
        for _ in range(counts[0]):
            name = cursor.text()
            if name in infos:
                raise ValueError(f"tensor {name} stands there twice")
            infos[name] = cursor.info()
            last = f"tensor {name}"
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: the header is damaged behind {last}: {error}") from None
    align = metadata.get("general.alignment", _ALIGNMENT)
    return _File(path, metadata, infos, -(-(cursor.at + 4) // align) * align, data)
