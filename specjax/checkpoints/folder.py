"""A folder as Hugging Face has it: ``config.json`` and safetensors, one file or several with an index."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

FLOATS = {"F16", "BF16", "F32", "F64"}
_ROWS = 4096  # compared at once


def write(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    max_shard_bytes: int,
    of: Callable[[str], np.ndarray],
) -> None:
    """Writes a folder.

    Args:
      folder: it must hold no model yet.
      config: what ``config.json`` says; the tensors' type is added where they have but one.
      tensors: name to array, for sizes and types.
      max_shard_bytes: a larger model becomes several files and an index; a larger tensor becomes a
        file of its own.
      of: name to the values to write.

    Raises:
      ValueError: the folder holds a model, or the limit is below 1.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    # An older index or single file beside the new ones would be read in their stead.
    if old := sorted(file.name for file in folder.glob("model*.safetensors*")):
        raise ValueError(f"{folder} holds a model already: {', '.join(old)}")
    shards = _split({name: x.nbytes for name, x in tensors.items()}, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        tag = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"model{tag}.safetensors"
        # safetensors writes the memory as it lies, whatever the strides say
        values = {name: np.ascontiguousarray(of(name)) for name in names}
        safetensors.numpy.save_file(values, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(values, file)
    if len(shards) > 1:
        size = sum(x.nbytes for x in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    types = {str(x.dtype) for x in tensors.values()}
    write_json(folder / CONFIG, config | ({"torch_dtype": types.pop()} if len(types) == 1 else {}))


def open_tensors(folder: pathlib.Path) -> dict[str, Any]:
    """Name to lazy tensor; nothing but headers is read."""
    weight_map = None
    if not (folder / WEIGHTS).is_file():  # which transformers prefers too
        if not (folder / INDEX).is_file():
            raise ValueError(f"no {WEIGHTS} and no {INDEX} in {folder}")
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map")
    files = [WEIGHTS] if weight_map is None else sorted(set(weight_map.values()))
    if absent := [file for file in files if not (folder / file).is_file()]:
        raise ValueError(f"{folder} is incomplete; no file {', '.join(absent)}")
    tensors = {}
    for file in files:
        opened = _open_file(folder / file)
        tensors |= {
            name: opened.get_slice(name)
            for name in opened.keys()
            if weight_map is None or weight_map.get(name) == file
        }
    return tensors


def _open_file(file: pathlib.Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(file, framework="np")
    except safetensors.SafetensorError as error:
        cut = _cut_off(file)
        said = f"; it ends before {', '.join(cut)}" if cut else ""
        raise ValueError(f"{file} is no safetensors file: {error}{said}") from None


def _cut_off(file: pathlib.Path) -> list[str]:
    """Tensors that lie behind the end of a truncated file; none where its header is no header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        there = os.fstat(opened.fileno()).st_size - 8 - size
        try:
            header = json.loads(opened.read(size)) if there >= 0 else {}
            return [
                name
                for name, entry in sorted(header.items())
                if name != "__metadata__" and entry["data_offsets"][1] > there
            ]
        except (ValueError, AttributeError, LookupError, TypeError):
            return []


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, a new shard wherever the next tensor would not fit."""
    shards, used = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def equal(a: Any, b: Any) -> bool:
    """Compares two tables in files, block by block."""
    shape = a.get_shape()
    ends = [min(start + _ROWS, shape[0]) for start in range(0, shape[0], _ROWS)]
    return shape == b.get_shape() and all(
        np.array_equal(a[max(0, end - _ROWS) : end], b[max(0, end - _ROWS) : end]) for end in ends
    )


def given(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """An entry; null counts as absent."""
    return default if raw.get(name) is None else raw[name]


def read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no such file: {file}") from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
