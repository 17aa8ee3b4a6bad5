"""Tensors of a file that ``torch.save`` wrote, without torch and without running what the file says.

The file is a zip with a pickle, which may name any function to be called. Here it may name a handful, all of
which only describe tensors; anything else is refused.
"""

import collections
import io
import math
import pathlib
import pickle
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_TYPES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
}  # fmt: skip


# What a damaged file, or one of another kind, makes the readers say.
_DAMAGED = (
    zipfile.BadZipFile, pickle.UnpicklingError, EOFError, OSError, LookupError, TypeError, AttributeError,
)  # fmt: skip


class _Storage(NamedTuple):
    dtype: Any
    key: str


def load(file: pathlib.Path, values: bool = True) -> dict[str, np.ndarray]:
    """Name to array of a saved dict of tensors.

    Args:
      file: what ``torch.save`` wrote.
      values: False reads names, shapes and types alone; all values are 0 then.

    Raises:
      ValueError: no such file, another kind of file, or one that asks for more than tensors.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickled) != 1:
                raise ValueError(f"{file} holds no data.pkl: torch did not write it")
            reader = _Reader(archive, pickled[0].removesuffix("data.pkl"), file, values)
            found = reader.load()
    except _DAMAGED as error:
        raise ValueError(
            f"{file} cannot be read: {error} (files of torch before 1.6 are none of this kind)"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(x, np.ndarray) for x in found.values()):
        raise ValueError(f"{file} holds no dict of tensors")
    return dict(found)


class _Reader(pickle.Unpickler):
    """Makes NumPy arrays where torch makes tensors."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, file: pathlib.Path, values: bool):
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")))
        self.archive, self.folder, self.file, self.values = archive, folder, file, values

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _TYPES:
            return np.dtype(_TYPES[name])
        raise ValueError(
            f"{self.file} asks for {module}.{name}, which is no tensor; it is not read"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage":
            raise ValueError(f"{self.file} refers to a {kind!r}, not to a tensor's storage")
        return _Storage(dtype, key)

    def _tensor(
        self, storage: _Storage, offset: int, size: tuple, stride: tuple, *_: Any
    ) -> np.ndarray:
        if not self.values:
            return np.broadcast_to(np.zeros((), storage.dtype), size)
        raw = np.frombuffer(self.archive.read(f"{self.folder}data/{storage.key}"), storage.dtype)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        inside = min((offset, *size, *stride)) >= 0 and last < len(raw)
        if math.prod(size) and not inside:
            raise ValueError(f"{self.file}: a tensor of {size} does not lie in its storage")
        steps = [s * raw.itemsize for s in stride]
        return np.lib.stride_tricks.as_strided(raw[offset:], size, steps, writeable=False).copy()
