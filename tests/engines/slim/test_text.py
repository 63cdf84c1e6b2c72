"""Pieces of text add up to the text of the whole, with stop strings cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from slim_engine.errors import CheckpointError, RequestError
from slim_engine.text import Detokenizer, TextCodec, TextStream

TEXT = "naïve 雪 😀 café <|im_end|> done"


def test_round_trip(llama: Path) -> None:
    codec = TextCodec(llama)
    assert codec.decode(codec.encode(TEXT), skip_special=False) == TEXT
    assert codec.decode(codec.encode("a<|im_end|>b")) == "ab"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_add_up(llama: Path, size: int) -> None:
    codec = TextCodec(llama)
    ids = codec.encode(TEXT)
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(ids[i : i + size], last=i + size >= len(ids)) for i in range(0, len(ids), size)]
    assert "".join(pieces) == codec.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)  # no half characters


def test_half_a_character_at_the_end_is_shown_at_last(llama: Path) -> None:
    codec = TextCodec(llama)
    ids = codec.encode("a雪")[:-1]
    assert Detokenizer(codec).push(ids, last=True) == "a\ufffd"


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_stop_string_is_never_shown(llama: Path, size: int) -> None:
    codec = TextCodec(llama)
    ids = codec.encode("one two ENENDxyz")
    stream = TextStream(codec, ("END", "zzz"))
    text = "".join(stream.push(ids[i : i + size], i + size >= len(ids)) for i in range(0, len(ids), size))
    assert text == "one two EN"


def test_held_text_is_given_out_when_it_is_not_a_stop(llama: Path) -> None:
    codec = TextCodec(llama)
    stream = TextStream(codec, ("END",))
    assert stream.push(codec.encode("aEN")) == "a"
    assert stream.push(codec.encode("x")) == "ENx"
    assert stream.push(codec.encode("E")) == ""
    assert stream.push([], last=True) == "E"


def test_first_stop_wins(llama: Path) -> None:
    codec = TextCodec(llama)
    detokenizer = Detokenizer(codec)
    found = [detokenizer.push_and_find(t, ("cd", "bcd")) for t in codec.encode("abcd")]
    assert found == [None, None, None, "bcd"]


def test_chat_template(llama: Path) -> None:
    codec = TextCodec(llama)
    ids = codec.chat([{"role": "user", "content": "hi"}])
    assert codec.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(RequestError, match="chat template refused"):
        codec.chat([{"role": "user"}])


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer.json"):
        TextCodec(tmp_path)
