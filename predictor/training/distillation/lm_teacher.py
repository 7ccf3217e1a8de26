"""A language model as a teacher: forecast lengths from its states over a user's turn of a chat. It is also
trained on the beginnings of answers.

Requires torch and transformers. Used in training only.
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
from predictor.training.auxiliary_tasks import HIDDEN, AuxiliaryTask
from predictor.training.networks import LengthNet
from predictor.wordpiece import pad

HEAD_TOKENS, TAIL_TOKENS = 110, 60
"""Of longer prompts, only the beginning and the end are read."""
ANSWER_TOKENS = 81
MAX_TOKEN_CHARS = 16
"""Texts are truncated to this number of characters per requested token before they are tokenized."""
PREFIX_WEIGHT, SHAPE_WEIGHT = 0.3, 0.1
"""Weights of the losses on the first tokens and on the shape of an answer."""
QUESTION, ANSWER = "first question", "first answer"


class ChatTokenizer:
    """Tokenize texts for a language model. Ids are the token ids plus one, so that 0 is padding."""

    def __init__(self, source: str) -> None:
        """`source` is a Hub id or a folder. Raises DataError if it has no usable tokenizer."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise DataError(f"the language model {source} cannot be read: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"the language model {source} has no token that ends a text")
        self.end = int(self._tokenizer.eos_token_id) + 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [[token + 1 for token in ids] for ids in encoded]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without special tokens."""
        ids = [[token - 1 for token in row] for row in rows]
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts

    def encode_padded(self, texts: Sequence[str], max_tokens: int) -> NDArray[np.int64]:
        """Return texts with an end token, truncated to `max_tokens` and padded `[texts, longest]`."""
        prefixes = [text[: max_tokens * MAX_TOKEN_CHARS] for text in texts]
        ends = ([self.end] if prefix == text else [] for prefix, text in zip(prefixes, texts, strict=True))
        encoded = zip(self.encode(prefixes), ends, strict=True)
        return pad([[*ids, *end][:max_tokens] for ids, end in encoded])

    def encode_chats(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        """Return prompts as a user's turn of a chat, up to the start of the answer `[prompts, longest]`."""
        before, after = self.encode(self._turn_affixes())
        truncated = (
            ids if len(ids) <= HEAD_TOKENS + TAIL_TOKENS else ids[:HEAD_TOKENS] + ids[-TAIL_TOKENS:]
            for ids in self.encode(prompts)
        )
        return pad([[*before, *ids, *after] for ids in truncated])

    def _turn_affixes(self) -> tuple[str, str]:
        """Return the text around a question in the second turn of a chat, which has no system prompt."""
        if not self._tokenizer.chat_template:
            return "", "\n"
        first_turn = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        template = self._tokenizer.apply_chat_template
        chat = template([*first_turn, first_turn[0]], tokenize=False, add_generation_prompt=True)
        before, _, after = chat.removeprefix(template(first_turn, tokenize=False)).rpartition(QUESTION)
        return before, after


class LanguageModelEncoder(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A causal language model as an encoder: the state at the last token and the mean of all states."""

    def __init__(self, source: str) -> None:
        """`source` is a Hub id or a folder. Raises DataError if the model cannot be read."""
        super().__init__()
        from transformers import AutoModelForCausalLM

        try:
            self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise DataError(f"the language model {source} cannot be read: {error}") from error
        self.hidden = int(self.model.config.hidden_size)
        self.width = 2 * self.hidden

    def forward(self, tokens: Tensor) -> Tensor:
        return self.pool(self.states(self.embed(tokens), tokens != 0), tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of tokens `[texts, tokens, hidden]`."""
        embeddings: Tensor = self.model.get_input_embeddings()((tokens - 1).clamp_min(0))
        return embeddings

    def states(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden states `[texts, tokens, hidden]`. Positions count only unmasked tokens."""
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        states: Tensor = self.model.base_model(
            inputs_embeds=embeddings, attention_mask=mask.long(), position_ids=positions, use_cache=False
        ).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of each next token. Those of token `i` are at position `i - 1`."""
        logits: Tensor = self.model.get_output_embeddings()(states).float()
        return logits

    @staticmethod
    def pool(states: Tensor, tokens: Tensor) -> Tensor:
        """Return the last and the mean state of each prompt `[prompts, 2 * hidden]`."""
        mask, states = (tokens != 0).float(), states.float()
        count = mask.sum(1, keepdim=True)
        last = states[torch.arange(len(states), device=states.device), count[:, 0].long() - 1]
        return torch.cat([last, (states * mask[..., None]).sum(1) / count], 1)


class AnswerPrefixTask(AuxiliaryTask):
    """Predict the first tokens and the shape of one answer per prompt."""

    def __init__(self, answers: Answers, encoder: LanguageModelEncoder, models: int) -> None:
        """`answers.prefix` contains token ids of the language model."""
        super().__init__()
        self.models = nn.Embedding(models, encoder.hidden)
        nn.init.normal_(self.models.weight, std=0.02)
        self.hidden = nn.Linear(encoder.width + encoder.hidden, HIDDEN)
        self.shape = nn.Linear(HIDDEN, len(SHAPES) * OCTAVES)
        self.register_buffer("of_row", torch.tensor(answers.of_row))
        self.register_buffer("shapes", torch.tensor(answers.shape))
        self.register_buffer("prefix", torch.tensor(answers.prefix))

    def encode(
        self, net: LengthNet, pieces: Tensor, owner: Tensor, rows: Tensor, served: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode prompts followed by the answering model's embedding and the answer, in one pass."""
        row_of_prompt = self._sample_rows(len(pieces), owner, rows)
        with_answer = (row_of_prompt >= 0).nonzero()[:, 0]
        if not len(with_answer):
            return net.encode(pieces), pieces.new_zeros((), dtype=torch.float32)
        answer = self.of_row[rows[row_of_prompt[with_answer]]]
        model = self.models(served[row_of_prompt[with_answer]])
        prefix = self.prefix.new_zeros(len(pieces), self.prefix.shape[1])
        prefix[with_answer] = self.prefix[answer]
        in_prefix = prefix != 0
        body, longest = net.body, pieces.shape[1]
        with torch.autocast(pieces.device.type, torch.bfloat16, enabled=pieces.is_cuda):
            separator = model.new_zeros(len(pieces), body.hidden).index_copy(0, with_answer, model)
            inputs = torch.cat([body.embed(pieces), separator[:, None], body.embed(prefix)], 1)
            mask = torch.cat([pieces != 0, torch.ones_like(pieces[:, :1], dtype=torch.bool), in_prefix], 1)
            states = body.states(inputs, mask)
            logits = body.logits(states[:, longest:-1][in_prefix])
            encoded = body.pool(states[:, :longest], pieces)
            hidden = torch.relu(self.hidden(torch.cat([encoded[with_answer], model], 1)))
            shape = self.shape(hidden).float().unflatten(1, (OCTAVES, -1))
        prefix_loss = functional.cross_entropy(logits, prefix[in_prefix] - 1)
        shape_loss = functional.cross_entropy(shape, self.shapes[answer])
        return encoded, PREFIX_WEIGHT * prefix_loss + SHAPE_WEIGHT * shape_loss

    def _sample_rows(self, prompts: int, owner: Tensor, rows: Tensor) -> Tensor:
        """Return the index in `rows` of a random row with a known answer for each prompt, -1 if none."""
        known = (self.of_row[rows] >= 0).nonzero()[:, 0]
        shuffled = known[torch.randperm(len(known), device=known.device)]
        return torch.full((prompts,), -1, device=rows.device).index_put((owner[shuffled],), shuffled)
