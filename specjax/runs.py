"""A folder belongs to one run: the same run goes on in it, another is refused."""

import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

DESCRIPTION = "run.json"


def write_whole(path: epath.Path, text: str) -> None:
    """Writes under a name of this process, then renames: a file that exists is whole."""
    beside = path.parent / f"unfinished-{os.getpid()}-{path.name}"
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def claim(folder: str, description: Mapping[str, Any]) -> None:
    """Marks a folder as this run's, or finds that it is.

    Args:
      folder: where the run writes.
      description: what makes two runs the same: inputs, weights, settings. JSON values.

    Raises:
      ValueError: the folder holds another run; the message names what differs.
    """
    root = epath.Path(folder).expanduser()
    file, mine = root / DESCRIPTION, json.loads(json.dumps(description))
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(mine, indent=1) + "\n")
        return
    theirs = json.loads(file.read_text(encoding="utf-8"))
    names = sorted({n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n)})
    if names:
        differ = "; ".join(f"{n}: {theirs.get(n)!r} there, {mine.get(n)!r} here" for n in names)
        raise ValueError(f"{root} holds another run ({differ}); choose another output directory")


def local(folder: str, what: str) -> str:
    """The folder, unless it is a remote one, which would be made as a local folder of that name.

    Raises:
      ValueError: it is remote.
    """
    if "://" in folder:
        raise ValueError(
            f"{what} are written to a local folder, not to {folder}; copy them afterwards"
        )
    return folder
