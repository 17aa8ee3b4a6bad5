"""Gin files, read from scripts."""

import pathlib
import re
from typing import Any

import gin

# What gin raises on a wrong file or binding, beside ValueError.
_BAD_GIN = (OSError, SyntaxError, NameError, AttributeError, ImportError, KeyError)
ROOT = pathlib.Path(__file__).resolve().parents[1]


def parse(gin_files: list[str], bindings: list[str] = (), search_paths: list[str] = ()) -> None:
    """Reads gin files, found relative to the working directory, ``search_paths`` or the source tree.

    Raises:
      ValueError: a file is not there.
    """
    paths = (".", *search_paths, str(ROOT))
    for file in gin_files:
        if not any((pathlib.Path(path) / file).exists() for path in paths):
            raise ValueError(f"no gin file {file} in {', '.join(dict.fromkeys(paths))}")
    with gin.unlock_config():
        gin.clear_config()
        for path in paths[1:]:
            gin.add_config_file_search_path(path)
        try:
            _check_macros(gin_files, bindings)
            _parse(gin_files, bindings, paths)
        except _BAD_GIN as error:
            raise ValueError(" ".join(str(error).split())) from None


def _parse(gin_files: list[str], bindings: list[str], paths: tuple[str, ...]) -> None:
    """Files and bindings, with the files' imports for these where they name what no file mentions."""
    try:
        gin.parse_config_files_and_bindings(gin_files, list(bindings))
    except (ValueError, *_BAD_GIN) as first:
        imports = _imports(gin_files, bindings, paths)
        if not imports:
            raise
        gin.clear_config()
        try:
            gin.parse_config_files_and_bindings(gin_files, [*imports, *bindings])
        except (ValueError, *_BAD_GIN):
            raise first from None


def _imports(gin_files: list[str], bindings: list[str], paths: tuple[str, ...]) -> list[str]:
    """The files' import lines that the bindings need.

    gin knows of an imported module only what the files themselves mention. Names that two modules have
    are left out.
    """
    known: dict[str, set[str]] = {}
    unread, read = list(gin_files), set()
    while unread:
        file = unread.pop()
        where = (pathlib.Path(path) / file for path in paths)
        text = next((w.read_text(encoding="utf-8") for w in where if w.exists()), "")
        read.add(file)
        unread += [f for f in re.findall(r"^include '(.+)'", text, re.MULTILINE) if f not in read]
        for line in re.findall(r"^(?:from [\w.]+ )?import .+$", text, re.MULTILINE):
            line = line.partition("#")[0].strip()
            known.setdefault(re.split(r"[ .]", line)[-1], set()).add(line)
    unquoted = (re.sub(r"'[^']*'|\"[^\"]*\"", "", binding) for binding in bindings)
    named = {name for b in unquoted for name in re.findall(r"(?:^|[@(\[,\s/])([a-z]\w*)\.", b)}
    lines = sorted({line for name in named for line in known.get(name, ())})
    if not named or not named <= known.keys() or len(lines) != len(named):
        return []
    return ["from __gin__ import dynamic_registration", *lines]


def _check_macros(gin_files: list[str], bindings: list[str]) -> None:
    """Raises ValueError on a macro that no file knows: a typing error would have no effect."""
    names = [binding.partition("=")[0].strip() for binding in bindings]
    macros = [name for name in names if name.isupper() and "." not in name and "/" not in name]
    if not macros:
        return
    gin.parse_config_files_and_bindings(gin_files, [], finalize_config=False)
    known = gin.config_str()
    gin.clear_config()
    for name in macros:
        if not re.search(rf"(^|%){name}\b", known, re.MULTILINE):
            raise ValueError(f"no gin file knows {name}")


def macro(name: str) -> Any:
    """What a macro says; what it makes, for one such as ``MODEL = @target/t5.T5()``.

    Raises:
      ValueError: the files read do not bind it.
    """
    try:
        bound: Any = gin.query_parameter(f"{name}/gin.macro.value")
    except ValueError:
        raise ValueError(f"the gin files do not bind {name}") from None
    return bound.scoped_configurable_fn() if hasattr(bound, "scoped_configurable_fn") else bound


def save(folder: str) -> None:
    """Writes the bindings in effect to ``config.gin`` in a folder, local or ``gs://``."""
    from etils import epath

    root = epath.Path(folder).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.gin").write_text(gin.config_str(), encoding="utf-8")
