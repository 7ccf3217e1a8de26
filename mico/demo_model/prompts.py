"""Questions and requests of our own for the demo model's training data; another model answers them."""

import random
import re
from collections.abc import Callable, Iterator

from mico.demo_model import words

TOPICS = (*words.ANIMALS, *words.FOODS, *words.THINGS, *words.NATURE, *words.IDEAS)
ABOUT = (
    "Tell me about {x}.", "Explain {x} to a child.", "Tell me a fun fact about {x}.", "Describe {x} in two sentences.",
    "Give me three facts about {x}.", "Why are {x} important?", "Why do people like {x}?", "Write a poem about {x}.",
    "Write a short poem about {x}.", "Write a short story about {x}.", "Tell me a story about {x}.",
    "Write a haiku about {x}.", "Tell me a joke about {x}.", "Write a slogan about {x}.", "Write a riddle about {x}.",
    "Write a sentence about {x}.", "Write a paragraph about {x}.", "Make a list of five words about {x}.",
    "What should I know about {x}?", "What do you think about {x}?", "Ask me a question about {x}.",
    "What is special about {x}?", "What would the world be like without {x}?", "Where can I find {x}?",
    "Give me a title for a book about {x}.", "Write a tweet about {x}.", "What can we learn from {x}?",
    "I love {x}.", "I don't like {x}.", "Let's talk about {x}.", "What are {x} good for?",
    "Write a short song about {x}.", "Write a letter to a friend about {x}.", "Give me an idea for a game with {x}.",
)  # fmt: skip
ABOUT_TWO = (
    "What is the difference between {x} and {y}?", "Compare {x} and {y}.", "Write a short story about {x} and {y}.",
    "Which do you like more, {x} or {y}?", "What do {x} and {y} have in common?", "Write a poem about {x} and {y}.",
    "Are {x} better than {y}?", "Write a sentence with the words {x} and {y}.", "Tell me a story about {x} and {y}.",
)  # fmt: skip
PEOPLE = (
    "Write a story about a {trait} {job} named {name}.", "Tell me a story about a {trait} {job} in {place}.",
    "Write a short story about {name}, a {trait} {job}, and {x}.", "Describe a {trait} {job}.",
    "Write a story about {name} and {other}, who meet in {place}.", "Once upon a time, a {trait} {job} lived in {place}.",
    "Write a conversation between a {job} and a {other_job}.", "What does a {job} do?", "How do I become a {job}?",
    "Write a poem about a {trait} {job}.", "Tell me a bedtime story about a {trait} {job} and {animal}.",
    "Write a birthday card for my friend {name}.", "Write an email to {name} about {x}.", "What happens in {place}?",
    "My name is {name}. Tell me a story.", "Describe {place}.", "What would you take to {place}?",
    "Write a thank you note to {name} for the {food}.", "{name} and {other} want to buy {x}. Write a short story.",
)  # fmt: skip
DOING = (
    "How do I {task}?", "How can I {task}?", "Give me three tips: how to {task}.", "Explain how to {task}.",
    "I want to {task}. What should I do?", "What do I need to {task}?", "Can you help me to {task}?",
    "Write step by step how to {task}.", "Why should I {task}?", "My friend wants to {task}. Any advice?",
)  # fmt: skip
FEELING = (
    "I feel {feeling}.", "I am {feeling}. What should I do?", "I am {feeling}.", "My friend is {feeling}. How can I help?",
    "I'm {feeling}. Tell me something nice.",
)  # fmt: skip
EDITING = (
    "Rewrite this sentence in other words: {sentence}.", "Make this sentence longer: {sentence}.",
    "Make this sentence funny: {sentence}.", "Write a story that begins with: {sentence}.",
    "What happens next? {sentence}.", "Turn this sentence into a question: {sentence}.",
    "Write a sentence like this one: {sentence}.", "Explain this sentence: {sentence}.",
)  # fmt: skip
KINDS = ((ABOUT, 8), (ABOUT_TWO, 3), (PEOPLE, 6), (DOING, 3), (FEELING, 1), (EDITING, 2))
"""Templates, and how often each kind is drawn."""
ENDINGS = (" Keep it short.", " Please answer in one sentence.", " Use simple words.", " Please.")
SHARE_WITH_ENDING = 0.12


def own_prompts(count: int, seed: int) -> list[str]:
    """Return distinct prompts drawn from the templates."""
    drawn = _draw(random.Random(seed))
    found: dict[str, None] = {}
    while len(found) < count:
        found[next(drawn)] = None
    return list(found)


def _draw(rng: random.Random) -> Iterator[str]:
    pick: Callable[[list[str] | tuple[str, ...]], str] = rng.choice
    kinds, weights = zip(*KINDS, strict=True)
    while True:
        (kind,) = rng.choices(kinds, weights)
        prompt = pick(kind).format(
            x=pick(TOPICS),
            y=pick(TOPICS),
            animal=pick(words.ANIMALS),
            food=pick(words.FOODS),
            job=pick(words.JOBS).replace("-", " "),
            other_job=pick(words.JOBS).replace("-", " "),
            trait=pick(words.TRAITS),
            name=pick(words.NAMES),
            other=pick(words.NAMES),
            place=pick(words.PLACES),
            task=pick(words.TASKS),
            feeling=pick(words.FEELINGS),
            sentence=pick(words.SENTENCES),
        )
        prompt = re.sub(r"\ba (?=[aeio])", "an ", prompt)
        yield prompt + (pick(ENDINGS) if rng.random() < SHARE_WITH_ENDING else "")
