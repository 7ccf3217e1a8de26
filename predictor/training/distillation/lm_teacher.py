"""A language model as a teacher: it foretells lengths from what it makes of a prompt at the end of a chat's
turn, while it foretells how answers begin.

Needs torch and transformers; training only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from predictor.data.answer_texts import OCTAVES, SHAPES, Answers
from predictor.errors import DataError
from predictor.training.auxiliary_tasks import HIDDEN, Beside
from predictor.training.networks import LengthNet
from predictor.wordpiece import pad

HEAD_TOKENS, TAIL_TOKENS = 110, 60
"""Of a longer prompt only its beginning and end are read."""
ANSWER_TOKENS = 81
TOKEN_CHARS = 16
"""More of a text than so many characters a token is not even looked at."""
WORDS_SHARE, SHAPE_SHARE = 0.3, 0.1
"""What it weighs beside the length to foretell an answer's first tokens, and its shape."""
QUESTION, ANSWER = "first question", "first answer"


class Tokens:
    """Texts as a language model reads them: the ids of its tokens plus one, so that 0 is padding."""

    def __init__(self, source: str) -> None:
        """`source` is a Hub id or a folder. Raises DataError if it has no tokenizer that can be used."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise DataError(f"the language model {source} cannot be read: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"the language model {source} has no token that ends a text")
        self.end = int(self._tokenizer.eos_token_id) + 1

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [[token + 1 for token in ids] for ids in found]

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        ids = [[token - 1 for token in row] for row in rows]
        found: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return found

    def whole(self, texts: Sequence[str], most: int) -> NDArray[np.int64]:
        """Texts with the mark of their end, of which `most` tokens are kept `[texts, longest]`."""
        begun = [text[: most * TOKEN_CHARS] for text in texts]
        ends = ([self.end] if part == text else [] for part, text in zip(begun, texts, strict=True))
        return pad([[*ids, *end][:most] for ids, end in zip(self.ids(begun), ends, strict=True)])

    def chats(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        """Prompts as a user's turn of a chat, up to where the answer begins `[prompts, longest]`."""
        before, after = self.ids(self._turn())
        rows = self.ids(prompts)
        kept = (
            ids if len(ids) <= HEAD_TOKENS + TAIL_TOKENS else ids[:HEAD_TOKENS] + ids[-TAIL_TOKENS:]
            for ids in rows
        )
        return pad([[*before, *ids, *after] for ids in kept])

    def _turn(self) -> tuple[str, str]:
        """What stands around a question in a chat: a later one, which no system prompt is put before."""
        if not self._tokenizer.chat_template:
            return "", "\n"
        begun = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        template = self._tokenizer.apply_chat_template
        whole = template([*begun, begun[0]], tokenize=False, add_generation_prompt=True)
        before, _, after = whole.removeprefix(template(begun, tokenize=False)).rpartition(QUESTION)
        return before, after


class Reader(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A causal language model: its state at a prompt's last token beside the mean of its states there."""

    def __init__(self, source: str) -> None:
        """`source` is a Hub id or a folder. Raises DataError if there is no such model."""
        super().__init__()
        from transformers import AutoModelForCausalLM

        try:
            self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise DataError(f"the language model {source} cannot be read: {error}") from error
        self.hidden = int(self.model.config.hidden_size)
        self.width = 2 * self.hidden

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(self.states(self.embedded(tokens), tokens != 0), tokens)

    def embedded(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model.get_input_embeddings()((tokens - 1).clamp_min(0))
        return found

    def states(self, embedded: Tensor, real: Tensor) -> Tensor:
        """Last states `[texts, tokens, hidden]`; places count the real tokens alone."""
        places = (real.long().cumsum(1) - 1).clamp_min(0)
        found: Tensor = self.model.base_model(
            inputs_embeds=embedded, attention_mask=real.long(), position_ids=places, use_cache=False
        ).last_hidden_state
        return found

    def logits(self, states: Tensor) -> Tensor:
        """Of each next token; token `i` of the texts is the place `i - 1`."""
        found: Tensor = self.model.get_output_embeddings()(states).float()
        return found

    @staticmethod
    def read(states: Tensor, tokens: Tensor) -> Tensor:
        """`[prompts, 2 * hidden]` from the states of prompts."""
        real, states = (tokens != 0).float(), states.float()
        count = real.sum(1, keepdim=True)
        last = states[torch.arange(len(states), device=states.device), count[:, 0].long() - 1]
        return torch.cat([last, (states * real[..., None]).sum(1) / count], 1)


class AnswerBeginnings(Beside):
    """How badly a language model foretells the first tokens and the shape of an answer of each prompt."""

    def __init__(self, answers: Answers, reader: Reader, models: int) -> None:
        """`answers.first` is in the reader's own tokens."""
        super().__init__()
        self.models = nn.Embedding(models, reader.hidden)
        nn.init.normal_(self.models.weight, std=0.02)
        self.hidden = nn.Linear(reader.width + reader.hidden, HIDDEN)
        self.shape = nn.Linear(HIDDEN, len(SHAPES) * OCTAVES)
        self.register_buffer("of_row", torch.tensor(answers.of_row))
        self.register_buffer("shapes", torch.tensor(answers.shape))
        self.register_buffer("prefix", torch.tensor(answers.prefix))

    def read(
        self, net: LengthNet, pieces: Tensor, owner: Tensor, rows: Tensor, served: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Behind each prompt stand a mark of the model that answers and the answer: all is read at once."""
        place = self._one_of_each(len(pieces), owner, rows)
        has = (place >= 0).nonzero()[:, 0]
        if not len(has):
            return net.read(pieces), pieces.new_zeros((), dtype=torch.float32)
        answer, who = self.of_row[rows[place[has]]], self.models(served[place[has]])
        told = self.prefix.new_zeros(len(pieces), self.prefix.shape[1])
        told[has] = self.prefix[answer]
        body, longest = net.body, pieces.shape[1]
        with torch.autocast(pieces.device.type, torch.bfloat16, enabled=pieces.is_cuda):
            mark = who.new_zeros(len(pieces), body.hidden).index_copy(0, has, who)
            inputs = torch.cat([body.embedded(pieces), mark[:, None], body.embedded(told)], 1)
            real = torch.cat([pieces != 0, torch.ones_like(pieces[:, :1], dtype=torch.bool), told != 0], 1)
            states = body.states(inputs, real)
            logits = body.logits(states[:, longest:-1][told != 0])
            read = body.read(states[:, :longest], pieces)
            hidden = torch.relu(self.hidden(torch.cat([read[has], who], 1)))
            shape = self.shape(hidden).float().unflatten(1, (OCTAVES, -1))
        words = functional.cross_entropy(logits, told[told != 0] - 1)
        shaped = functional.cross_entropy(shape, self.shapes[answer])
        return read, WORDS_SHARE * words + SHAPE_SHARE * shaped

    def _one_of_each(self, prompts: int, owner: Tensor, rows: Tensor) -> Tensor:
        """A place in `rows` for each prompt, by chance among those whose answer is known; -1 without one."""
        known = (self.of_row[rows] >= 0).nonzero()[:, 0]
        shuffled = known[torch.randperm(len(known), device=known.device)]
        return torch.full((prompts,), -1, device=rows.device).index_put((owner[shuffled],), shuffled)
