"""The span decoder: windows cover the context, and its answers are those of a search over all spans."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertForQuestionAnswering, PreTrainedTokenizerFast

from hf_dist.data.builtin import small_models
from hf_dist.tasks.question_answering.decode import (
    OUTSIDE,
    Candidates,
    answer,
    best_candidates,
    cut_questions,
    decode,
    span_of,
    windows,
)

CONTEXT = "  open: Open the file\n\nfor reading.  close: Close it; é ≠ e.\tread: Read some bytes."


def word_tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A token a word, and no class token: [SEP] between the texts and at the end."""
    words = ["what", "does", "it", "do", "open", "close", "read", "the", "file", ":", ".", *"abcdef"]
    tokenizer = Tokenizer(
        models.WordLevel({name: at for at, name in enumerate(["[PAD]", "[UNK]", "[SEP]", *words])}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", padding_side=padding_side
    )


@pytest.mark.parametrize("make", [small_models.bpe_tokenizer, word_tokenizer])
def test_windows_cover_the_context_and_overlap_by_the_stride(make):
    tokenizer = make()
    stride = 5
    context = "open: Open the file for reading. close: Close the file, and read it. read: Read some bytes."
    found = windows(tokenizer, ["what does it do", "a"], [context, "b c"], max_length=24, doc_stride=stride)
    assert [window.example for window in found] == sorted(window.example for window in found)
    mine = [window for window in found if window.example == 0]
    assert len(mine) > 1 and sum(window.example == 1 for window in found) == 1
    whole = windows(tokenizer, ["what does it do"], [context], max_length=500, doc_stride=0)[0]
    parts = [window.offsets[window.offsets[:, 0] != OUTSIDE] for window in mine]
    for before, after in pairwise(parts):
        assert (before[-stride:] == after[:stride]).all()
    covered = np.concatenate([parts[0], *(part[stride:] for part in parts[1:])])
    assert (covered == whole.offsets[whole.offsets[:, 0] != OUTSIDE]).all()
    for window in mine:
        assert len(window.inputs["input_ids"]) == len(window.offsets) <= 24


def test_offsets_leave_white_space_out_and_count_characters():
    tokenizer = small_models.bpe_tokenizer()
    window = windows(tokenizer, ["q"], [CONTEXT], max_length=200, doc_stride=0)[0]
    # The bytes of é and ≠ are tokens of their own, with the same place.
    places = [place for place, _ in groupby(map(tuple, window.offsets.tolist())) if place[0] != OUTSIDE]
    texts = [CONTEXT[start:end] for start, end in places]
    assert all(text == text.lstrip() for text in texts)
    assert "".join(texts).replace(" ", "") == "".join(CONTEXT.split())
    assert window.null_position == 0


@pytest.mark.parametrize(
    "piece", ["Open the file\n\nfor reading.", "é", "Close it; é ≠ e.", "bytes.", "open"]
)
def test_a_span_is_found_and_read_back(piece):
    tokenizer = small_models.bpe_tokenizer()
    window = windows(tokenizer, ["q"], [CONTEXT], max_length=200, doc_stride=0)[0]
    start = CONTEXT.index(piece)
    found = span_of(window.offsets, start, start + len(piece))
    assert found is not None
    first, last = found
    text = CONTEXT[window.offsets[first, 0] : window.offsets[last, 1]]
    # A token may reach over the end of the piece, never a whole token more.
    assert text.startswith(piece) and (last == first or window.offsets[last, 0] < start + len(piece))


def test_a_span_outside_the_window_is_none():
    offsets = np.array([[OUTSIDE, OUTSIDE], [4, 7], [8, 10], [OUTSIDE, OUTSIDE]])
    assert span_of(offsets, 4, 10) == (1, 2)
    assert span_of(offsets, 8, 9) == (2, 2)
    assert span_of(offsets, 3, 7) is None and span_of(offsets, 8, 11) is None
    assert span_of(offsets[:1], 0, 1) is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_answer_tokens", [1, 4, 50])
def test_answers_are_those_of_a_search_over_all_spans(seed, max_answer_tokens):
    """With all positions as candidates every span of every window is weighed, as in the loops here."""
    rng = np.random.default_rng(seed)
    tokenizer = word_tokenizer()
    context = " ".join(rng.choice(list("abcdef"), 30))
    pieces = windows(tokenizer, ["what"], [context], max_length=16, doc_stride=4)
    assert len(pieces) > 2
    logits = [rng.normal(size=(2, len(piece.offsets))).astype(np.float32) for piece in pieces]
    expected: dict[tuple[int, int], float] = {}
    for piece, (starts, ends) in zip(pieces, logits, strict=True):
        for i in range(len(starts)):
            for j in range(i, min(i + max_answer_tokens, len(ends))):
                if piece.offsets[i, 0] != OUTSIDE and piece.offsets[j, 0] != OUTSIDE:
                    span = int(piece.offsets[i, 0]), int(piece.offsets[j, 1])
                    expected[span] = max(expected.get(span, -np.inf), float(starts[i] + ends[j]))
    ranked = sorted(expected.items(), key=lambda item: -item[1])[:7]

    longest = max(len(piece.offsets) for piece in pieces)
    batch = {
        "input_ids": torch.zeros(len(pieces), longest, dtype=torch.int64),
        "attention_mask": torch.zeros(len(pieces), longest, dtype=torch.int64),
    }
    padded = torch.full((2, len(pieces), longest), 99.0)  # padding must not win
    for row, (piece, found) in enumerate(zip(pieces, logits, strict=True)):
        batch["attention_mask"][row, : len(piece.offsets)] = 1
        padded[:, row, : len(piece.offsets)] = torch.from_numpy(found)
    candidates = best_candidates(padded[0], padded[1], batch, cls_token_id=None, n_best=100)
    decoded = decode(
        candidates,
        [piece.offsets for piece in pieces],
        context,
        max_answer_tokens=max_answer_tokens,
        n_best=7,
    )
    assert [(found.start, found.end) for found in decoded.answers] == [span for span, _ in ranked]
    assert [found.score for found in decoded.answers] == pytest.approx(
        [score for _, score in ranked], abs=1e-5
    )
    assert all(found.text == context[found.start : found.end] for found in decoded.answers)
    # All windows must say that there is no answer; without class token the first position says it.
    nulls = [float(starts[0] + ends[0]) for starts, ends in logits]
    assert decoded.null_score == pytest.approx(min(nulls) - ranked[0][1], abs=1e-5)


def test_candidates_of_left_padded_rows_count_from_their_first_token():
    start = torch.tensor([[9.0, 9.0, 0.0, 3.0, 1.0]])
    end = torch.tensor([[9.0, 9.0, 1.0, 0.0, 2.0]])
    batch = {
        "input_ids": torch.tensor([[0, 0, 7, 5, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    }
    found = best_candidates(start, end, batch, cls_token_id=5, n_best=2)[0]
    assert found.starts.tolist() == [1, 2] and found.ends.tolist() == [2, 0]
    assert found.null == 3.0 + 0.0  # the class token, 5, is second


def test_a_window_without_a_span_has_no_answer():
    empty = Candidates(
        starts=np.array([0]),
        start_logits=np.array([1.0], np.float32),
        ends=np.array([0]),
        end_logits=np.array([1.0], np.float32),
        null=2.0,
    )
    decoded = decode([empty], [np.full((3, 2), OUTSIDE)], "abc", max_answer_tokens=5, n_best=3)
    assert decoded.answers == [] and decoded.null_score == np.inf
    assert decoded.text(None) == decoded.text(0.0) == ""


def test_long_questions_are_cut_after_whole_tokens():
    tokenizer = small_models.bpe_tokenizer()
    long = "What does " + "get_payload_of_message " * 10
    short, cut = cut_questions(tokenizer, ["why?", long], 12)
    assert short == "why?" and long.startswith(cut)
    length = len(tokenizer(cut, add_special_tokens=False)["input_ids"])
    assert 10 <= length <= 12


def test_answer_runs_a_model_over_windows():
    """The best span of two windows is the better of what the model says of each by itself."""
    tokenizer = small_models.bpe_tokenizer()
    torch.manual_seed(0)
    model = BertForQuestionAnswering(small_models.small_bert(tokenizer)).eval()
    options = {"max_length": 24, "doc_stride": 6, "n_best": 500, "max_answer_tokens": 8}
    decoded = answer(model, tokenizer, "what?", CONTEXT, **options)
    best = -np.inf
    for window in windows(tokenizer, ["what?"], [CONTEXT], max_length=24, doc_stride=6):
        with torch.no_grad():
            out = model(**{name: torch.tensor([ids]) for name, ids in window.inputs.items()})
        inside = window.offsets[:, 0] != OUTSIDE
        for i in np.flatnonzero(inside):
            for j in np.flatnonzero(inside):
                if i <= j < i + 8:
                    best = max(best, (out.start_logits[0, i] + out.end_logits[0, j]).item())
    assert decoded.answers[0].score == pytest.approx(best, abs=1e-5)
    assert decoded.answers[0].text == CONTEXT[decoded.answers[0].start : decoded.answers[0].end]
