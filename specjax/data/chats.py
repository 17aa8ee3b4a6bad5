"""Chats in JSON lines as training text: who said what, and which tokens are the assistant's.

Two forms are read: OpenAI's ``{"messages": [{"role": "user", "content": "…"}, …]}``, and ShareGPT's
``{"conversations": [{"from": "human", "value": "…"}, …]}``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Bool, Int

from specjax.data.prompts import Message
from specjax.data.sources import read_lines
from specjax.data.tokenizers import Tokenizer

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
          "bard": "assistant", "assistant": "assistant", "system": "system"}  # fmt: skip
_LISTED = 5


def read(path: str) -> list[tuple[Message, ...]]:
    """All chats of a file; empty lines are skipped, and chats in which no assistant answers.

    Raises:
      ValueError: no such file, or lines that are no chats; the first of them are named.
    """
    file = epath.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"no chats at {file}")
    found, problems = [], []
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            found.append(parse(json.loads(line)))
        except ValueError as error:
            problems.append(f"line {number} {error}")
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(f"{file}: {'; '.join(problems[:_LISTED])}{more}")
    return [chat for chat in found if any(message.role == "assistant" for message in chat)]


def parse(row: Any) -> tuple[Message, ...]:
    """The messages of one line.

    Raises:
      ValueError: it has neither form, or somebody speaks whom no form knows.
    """
    if not isinstance(row, Mapping):
        raise ValueError("is no JSON object")
    name, keys = (
        ("messages", ("role", "content"))
        if "messages" in row
        else ("conversations", ("from", "value"))
    )
    said = row.get(name)
    if not isinstance(said, list) or not said:
        raise ValueError("has no list of messages or conversations")
    out = []
    for one in said:
        who, text = (one.get(key) if isinstance(one, Mapping) else None for key in keys)
        if who not in _ROLES or not isinstance(text, str):
            raise ValueError(
                f"has a message that is not {keys[0]} and {keys[1]} of user, assistant or system"
            )
        out.append(Message(_ROLES[who], text))
    return tuple(out)


def answers(
    vocabulary: Tokenizer, chat: Sequence[Message]
) -> tuple[Int[np.ndarray, " L"], Bool[np.ndarray, " L"]]:
    """A chat's ids, and which of them the assistant said: each turn's text and the id that ends it.

    Raises:
      ValueError: the template writes an earlier turn in another way once there is a later one.
    """
    said = [message._asdict() for message in chat]
    ids = np.asarray(vocabulary.chat(said, add_generation_prompt=False), np.int32)
    mine = np.zeros(len(ids), bool)
    ends = set(vocabulary.special.eos)
    for turn, message in enumerate(chat):
        if message.role != "assistant":
            continue
        asked = vocabulary.chat(said[:turn], add_generation_prompt=True)
        through = vocabulary.chat(said[: turn + 1], add_generation_prompt=False)
        if ids[: len(asked)].tolist() != asked or ids[: len(through)].tolist() != through:
            raise ValueError(
                "the chat template writes earlier turns otherwise once there are later ones"
            )
        stop = next(
            (i + 1 for i in range(len(asked), len(through)) if through[i] in ends), len(through)
        )
        mine[len(asked) : stop] = True
    return ids, mine
