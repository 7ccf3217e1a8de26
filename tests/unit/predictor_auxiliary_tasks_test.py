"""Answers' texts: their prefixes and shapes are encoded, and can be learned from an encoded prompt."""

import numpy as np
import pandas as pd
import torch

from predictor.data.answer_texts import PREFIX_PIECES, Answers, extract_answers
from predictor.training.auxiliary_tasks import AnswerTask
from predictor.wordpiece import END, LINE, PAD, PARAGRAPH, START, UNKNOWN, WordPieceTokenizer

PIECES = WordPieceTokenizer((PAD, LINE, PARAGRAPH, UNKNOWN, START, END, "yes", "no", ".", "-"))


def test_rows_without_a_text_have_no_answer() -> None:
    found = extract_answers(pd.Series(["Yes.", None, "", "- no\n- no\n- yes. No. Yes."]), PIECES)
    assert found is not None
    assert found.of_row.tolist() == [0, -1, -1, 1]
    assert found.prefix[0, :3].tolist() == [6, 8, 0]
    assert found.prefix.shape == (2, PREFIX_PIECES)
    assert found.shape.tolist() == [[0, 0, 1, 0], [2, 2, 2, 0]]  # two line ends, three items, three sentences


def test_a_corpus_without_texts_has_none() -> None:
    assert extract_answers(pd.Series(["", None]), PIECES) is None


def test_shape_and_first_words_can_be_learned_from_encoded_prompts() -> None:
    torch.manual_seed(1)
    prefix = np.zeros((2, PREFIX_PIECES), dtype=np.int64)
    prefix[:, 0] = 6, 7
    task = AnswerTask(Answers(np.array([0, 1, -1]), prefix, np.array([[0, 0, 1, 0], [3, 2, 3, 1]])), 4, 2, 10)
    read, owner, served = torch.eye(4)[:2], torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    rows = torch.tensor([0, 1, 2])
    before = task(read, owner, rows, served)
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    for _ in range(60):
        loss = task(read, owner, rows, served)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task(read, owner, rows, served) < 0.1 * before
    assert task(read, owner[2:], rows[2:], served[2:]) == 0.0
