"""Chats in two forms; what the assistant said, and nothing else, is to be learned."""

import json

import numpy as np
import pytest

from specjax.data import chats
from specjax.data.prompts import Message
from tests.data.test_tokenizers import of_words  # noqa: F401 (a fixture)

TURNS = [("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", "a c")]


@pytest.fixture
def vocabulary(of_words):  # noqa: F811
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    return of_words(chat_template=template)


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_both_forms_are_read(tmp_path):
    names = {"user": "human", "assistant": "gpt"}
    one = {"messages": [{"role": r, "content": t} for r, t in TURNS]}
    other = {"conversations": [{"from": names[r], "value": t} for r, t in TURNS], "id": "x"}
    silent = {"messages": [{"role": "user", "content": "anybody?"}]}
    found = chats.read(write(tmp_path / "x.jsonl", one, other, silent))
    assert found == [tuple(Message(*turn) for turn in TURNS)] * 2


def test_the_assistant_s_tokens_are_marked(vocabulary):
    """Every turn of its, with the id that ends it; neither the header before nor the line behind."""
    ids, mine = chats.answers(vocabulary, [Message(*turn) for turn in TURNS])
    rendered = vocabulary.render(
        [dict(role=r, content=t) for r, t in TURNS], add_generation_prompt=False
    )
    assert vocabulary.encode(rendered, prefix=False) == ids.tolist()
    edges = np.flatnonzero(np.diff(np.pad(mine, 1).astype(int)))
    spans = [
        vocabulary.decode(ids[a:b], skip_special_tokens=False, to_eos=False)
        for a, b in edges.reshape(-1, 2)
    ]
    assert [span.replace("<|stop|>", "").strip() for span in spans] == ["c", "a c"]
    assert all("<|start|>" not in span for span in spans)
    assert all(ids[b - 1] in vocabulary.special.eos for b in edges[1::2])


@pytest.mark.parametrize("row, said", [
    ([], "line 1 is no JSON object"),
    ({"text": "a"}, "line 1 has no list of messages or conversations"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "line 1 has a message that is not role and content"),
    ({"conversations": [{"from": "gpt", "value": 1}]}, "line 1 has a message that is not from and value"),
])  # fmt: skip
def test_what_is_no_chat_is_named(row, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        chats.read(write(tmp_path / "x.jsonl", row))
    with pytest.raises(ValueError, match="no chats at"):
        chats.read(str(tmp_path / "none.jsonl"))
