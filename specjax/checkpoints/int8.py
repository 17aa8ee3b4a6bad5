"""int8 weights with one float32 scale per row, in one safetensors file.

For shipping small models: the dequantised weights *are* the model. Matrices (``[out, in]``
projections and the embedding) are stored as ``<name>.int8`` and ``<name>.scale``; norm scales and
relative-bias tables stay float32 under their own name. The file says which model it holds, so that
no other configuration is needed to load it, and the same parameters give the same bytes.
"""

import json
import os
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float, Float32, Int8, PyTree

from specjax.checkpoints import place, structure
from specjax.models import families
from specjax.models.families import Config, Network

FORMAT = "specjax.int8"
VERSION = "1"

# Below this a scale is subnormal: it has few bits left, and some devices flush it to zero.
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def quantise(
    weight: Float[np.ndarray, "N K"],
) -> tuple[Int8[np.ndarray, "N K"], Float32[np.ndarray, " N"]]:
    """Symmetric int8 per row: scale max|w| / 127, rounded half to even.

    Quantising what was dequantised gives the same integers and scales: in float32
    ``127 x (m / 127) / 127`` is ``m / 127`` for every m.

    Args:
      weight: finite values.

    Returns:
      Integers in -127 .. 127 and scales; a row of zeros (or of less than 1e-36) has scale 0.
    """
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(axis=1) / np.float32(127)
    scale = np.where(scale >= _SMALLEST_SCALE, scale, np.float32(0))
    kept = scale[:, None] > 0
    steps = np.where(kept, np.rint(weight / np.where(kept, scale[:, None], np.float32(1))), 0)
    return np.clip(steps, -127, 127).astype(np.int8), scale


def dequantise(
    steps: Int8[np.ndarray, "N K"], scale: Float32[np.ndarray, " N"]
) -> Float32[np.ndarray, "N K"]:
    """``steps x scale``, row by row."""
    return steps.astype(np.float32) * scale[:, None]


def save(
    path: str | os.PathLike,
    model: Network,
    params: PyTree,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a model; an existing file is replaced at once or not at all.

    Args:
      path: the file.
      model: its configuration is stored in the file.
      params: its parameters.
      metadata: further entries, e.g. where the weights come from.

    Raises:
      ValueError: the parameters do not fit the model, or are not finite (all tensors are named),
        or an entry of the metadata bears a reserved name.
    """
    structure.check(structure.shapes(params), structure.shapes(model.abstract()), "the tree")
    flat = {name: np.asarray(x, np.float32) for name, x in structure.flatten(params).items()}
    bad = [name for name, x in flat.items() if not np.isfinite(x).all()]
    if bad:
        raise ValueError(f"not finite: {', '.join(sorted(bad))}")
    own = _describe(model)
    if reserved := own.keys() & (metadata or {}).keys():
        raise ValueError(f"reserved metadata names: {', '.join(sorted(reserved))}")
    tensors = {}
    for name, x in flat.items():
        tensors |= _pair(name, *quantise(x)) if _is_quantised(name, x.shape) else {name: x}
    _replace(pathlib.Path(path), _serialise(tensors, own | dict(metadata or {})))


def load(
    path: str | os.PathLike, model: Network, dtype=jnp.float32, shardings: PyTree | None = None
) -> PyTree:
    """Dequantised parameters.

    Args:
      path: a file that `save` wrote.
      model: its sizes must be those of the file.
      dtype: type of the parameters returned; what rounds float32 is another model.
      shardings: see `place.targets`.

    Returns:
      The tree that ``model.abstract(dtype)`` describes.

    Raises:
      ValueError: no such file, of another format, or with missing, unexpected or misshapen tensors
        (all of them are named).
    """
    wanted = place.targets(model, dtype, shardings)
    with _open(path) as file:
        structure.check(_found(file), _stored(model), str(path))
        reads = {name: _reader(file, name, leaf.shape) for name, leaf in wanted.items()}
        return place.tree(reads, wanted, {name: name for name in wanted}, str(path))


def load_model(path: str | os.PathLike) -> tuple[Network, PyTree]:
    """The model that a file describes, and its dequantised parameters.

    Args:
      path: a file that `save` wrote.

    Returns:
      Model and parameters.

    Raises:
      ValueError: as `load`, or the file describes a model that is not known here.
    """
    model = families.of(read_config(path))
    return model, load(path, model)


def read_config(path: str | os.PathLike) -> Config:
    """The configuration of the model that a file describes.

    Raises:
      ValueError: no such file, of another format, or it describes no model that is known here.
    """
    described = read_metadata(path)
    try:
        return families.parse(described["model"], described["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes no model that is known here: {error}") from None


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """All entries of the file's metadata.

    Raises:
      ValueError: no such file, or of another format.
    """
    with _open(path) as file:
        return file.metadata()


def _describe(model: Network) -> dict[str, str]:
    described = families.dump(model)
    described["config"] = json.dumps(described["config"])
    return {"format": FORMAT, "format_version": VERSION, **described}


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    # A bias table is tiny, and its rows are heads, not outputs.
    return len(shape) == 2 and not name.endswith(".rel_embedding")


def _pair(name: str, steps: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{name}.int8": steps, f"{name}.scale": scale}


def _reader(file: safetensors.safe_open, name: str, shape: tuple[int, ...]) -> place.Read:
    """How to read a part of a dequantised tensor."""
    if not _is_quantised(name, shape):
        return lambda index: file.get_slice(name)[index]
    steps, scale = file.get_slice(f"{name}.int8"), file.get_slice(f"{name}.scale")
    return lambda index: dequantise(steps[index], scale[index[:1]])


def _stored(model: Network) -> dict[str, str]:
    """Name to type and shape of each tensor that the model's file must hold."""
    out = {}
    for name, shape in structure.shapes(model.abstract()).items():
        if _is_quantised(name, shape):
            out |= {f"{name}.int8": f"I8{list(shape)}", f"{name}.scale": f"F32{[shape[0]]}"}
        else:
            out[name] = f"F32{list(shape)}"
    return out


def _found(file: safetensors.safe_open) -> dict[str, str]:
    slices = {name: file.get_slice(name) for name in file.keys()}
    return {name: f"{x.get_dtype()}{list(x.get_shape())}" for name, x in slices.items()}


def _open(path: str | os.PathLike) -> safetensors.safe_open:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"no such file: {path}")
    try:
        file = safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    metadata = file.metadata() or {}
    found = metadata.get("format"), metadata.get("format_version")
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} has format {found}, not {(FORMAT, VERSION)}")
    return file


def _serialise(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """The file's bytes; safetensors orders the metadata at random, so the header is sorted here."""
    raw = safetensors.numpy.save(tensors, metadata)
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data stay aligned
    return len(text).to_bytes(8, "little") + text + raw[end:]


def _replace(path: pathlib.Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_bytes(content)
    os.replace(partial, path)
