"""Gin files, read from scripts."""

import pathlib
from typing import Any

import gin

ROOT = pathlib.Path(__file__).resolve().parents[1]


def parse(gin_files: list[str], bindings: list[str] = (), search_paths: list[str] = ()) -> None:
    """Reads gin files, found relative to the working directory, ``search_paths`` or the source tree.

    Raises:
      ValueError: a file is not there.
    """
    with gin.unlock_config():
        gin.clear_config()
        for path in (*search_paths, str(ROOT)):
            gin.add_config_file_search_path(path)
        try:
            gin.parse_config_files_and_bindings(gin_files, list(bindings))
        except OSError as error:
            raise ValueError(" ".join(str(error).split())) from None


def macro(name: str) -> Any:
    """What a macro such as ``MODEL = @target/t5.T5()`` makes.

    Raises:
      ValueError: the files read do not bind it.
    """
    try:
        bound: Any = gin.query_parameter(f"{name}/gin.macro.value")
    except ValueError:
        raise ValueError(f"the gin files do not bind {name}") from None
    return bound.scoped_configurable_fn()
