"""Questions with right answers, of our own, for the demo model's training data.

A model of this size knows little: what it shall know for sure is said often and in several ways.
"""

import random
from collections.abc import Iterator

from mico.demo_model import words

CAPITALS = dict(
    pair.split(": ")
    for pair in (
        "Argentina: Buenos Aires, Australia: Canberra, Austria: Vienna, Bangladesh: Dhaka, Belgium: Brussels, "
        "Bolivia: Sucre, Brazil: Brasilia, Bulgaria: Sofia, Canada: Ottawa, Chile: Santiago, China: Beijing, "
        "Colombia: Bogota, Croatia: Zagreb, Cuba: Havana, Denmark: Copenhagen, Ecuador: Quito, Egypt: Cairo, "
        "Estonia: Tallinn, Ethiopia: Addis Ababa, Finland: Helsinki, France: Paris, Germany: Berlin, Ghana: Accra, "
        "Greece: Athens, Hungary: Budapest, Iceland: Reykjavik, India: New Delhi, Indonesia: Jakarta, Iran: Tehran, "
        "Iraq: Baghdad, Ireland: Dublin, Italy: Rome, Jamaica: Kingston, Japan: Tokyo, Jordan: Amman, "
        "Kenya: Nairobi, Latvia: Riga, Lebanon: Beirut, Lithuania: Vilnius, Malaysia: Kuala Lumpur, "
        "Mexico: Mexico City, Mongolia: Ulaanbaatar, Morocco: Rabat, Nepal: Kathmandu, the Netherlands: Amsterdam, "
        "New Zealand: Wellington, Nigeria: Abuja, North Korea: Pyongyang, Norway: Oslo, Pakistan: Islamabad, "
        "Peru: Lima, the Philippines: Manila, Poland: Warsaw, Portugal: Lisbon, Romania: Bucharest, Russia: Moscow, "
        "Saudi Arabia: Riyadh, Senegal: Dakar, Serbia: Belgrade, Singapore: Singapore, Slovakia: Bratislava, "
        "Slovenia: Ljubljana, South Korea: Seoul, Spain: Madrid, Sweden: Stockholm, Switzerland: Bern, "
        "Tanzania: Dodoma, Thailand: Bangkok, Tunisia: Tunis, Turkey: Ankara, Uganda: Kampala, Ukraine: Kyiv, "
        "the United Kingdom: London, the United States: Washington, Uruguay: Montevideo, Venezuela: Caracas, "
        "Vietnam: Hanoi, Zambia: Lusaka"
    ).split(", ")
)
LANGUAGES = dict(
    pair.split(": ")
    for pair in (
        "Austria: German, Brazil: Portuguese, China: Chinese, Egypt: Arabic, France: French, Germany: German, "
        "Greece: Greek, Italy: Italian, Japan: Japanese, Mexico: Spanish, Poland: Polish, Portugal: Portuguese, "
        "Russia: Russian, Spain: Spanish, Sweden: Swedish, Turkey: Turkish, the United Kingdom: English, "
        "the United States: English, Ukraine: Ukrainian, Vietnam: Vietnamese"
    ).split(", ")
)
OPPOSITES = (
    "big small, hot cold, fast slow, up down, day night, happy sad, old young, light dark, good bad, rich poor, "
    "strong weak, early late, open closed, full empty, high low, long short, hard soft, wet dry, clean dirty, "
    "left right, north south, east west, true false, loud quiet, near far, sweet sour, thick thin, wide narrow, "
    "first last, begin end, buy sell, win lose, love hate, push pull, give take, laugh cry, remember forget, "
    "inside outside, summer winter, brave afraid, alive dead, cheap expensive, easy difficult, heavy light"
).split(", ")
SOUNDS = dict(
    pair.split()
    for pair in (
        "cat meow, dog woof, cow moo, duck quack, sheep baa, pig oink, horse neigh, rooster cock-a-doodle-doo, "
        "lion roar, frog ribbit, bee buzz, snake hiss, owl hoot, mouse squeak, wolf howl, crow caw"
    ).split(", ")
)
BABIES = dict(
    pair.split()
    for pair in (
        "cat kitten, dog puppy, cow calf, horse foal, sheep lamb, pig piglet, duck duckling, hen chick, lion cub, "
        "goat kid, frog tadpole, kangaroo joey, deer fawn, swan cygnet, goose gosling"
    ).split(", ")
)
LEGS = {"a bird": 2, "a cat": 4, "a chicken": 2, "a cow": 4, "a dog": 4, "a horse": 4, "a person": 2, "a snake": 0,
        "a spider": 8, "an ant": 6, "a bee": 6, "an elephant": 4, "a fish": 0, "a crab": 10}  # fmt: skip
COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red", "a lemon": "yellow",
    "coal": "black", "an orange": "orange", "milk": "white", "chocolate": "brown", "the sea": "blue",
    "a tomato": "red", "a carrot": "orange", "a leaf": "green", "a frog": "green", "a flamingo": "pink",
}  # fmt: skip
ELEMENTS = {"hydrogen": "H", "oxygen": "O", "carbon": "C", "nitrogen": "N", "iron": "Fe", "gold": "Au", "silver": "Ag",
            "helium": "He", "sodium": "Na", "copper": "Cu", "lead": "Pb", "calcium": "Ca"}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
SEASONS = "spring summer autumn winter".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
KNOWN = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many days are in a year?": "There are 365 days in a year, and 366 in a leap year.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many seconds are in a minute?": "There are 60 seconds in a minute.",
    "How many continents are there?": "There are seven continents.",
    "How many planets are there?": "There are eight planets in our solar system.",
    "How many letters are in the alphabet?": "There are 26 letters in the English alphabet.",
    "What is the largest planet?": "Jupiter is the largest planet in our solar system.",
    "What is the smallest planet?": "Mercury is the smallest planet in our solar system.",
    "What is the largest animal?": "The blue whale is the largest animal.",
    "What is the tallest animal?": "The giraffe is the tallest animal.",
    "What is the fastest land animal?": "The cheetah is the fastest land animal.",
    "What is the largest ocean?": "The Pacific Ocean is the largest ocean.",
    "What is the highest mountain?": "Mount Everest is the highest mountain on Earth.",
    "What is the longest river?": "The Nile is often called the longest river.",
    "What is the largest country?": "Russia is the largest country by area.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "What do plants need?": "Plants need light, water and air.",
    "What is ice?": "Ice is frozen water.",
    "What is rain?": "Rain is water that falls from clouds.",
    "What is snow?": "Snow is frozen water that falls from clouds as flakes.",
    "What is the moon?": "The moon is a ball of rock that goes around the Earth.",
    "What is the sun?": "The sun is a star. It gives us light and warmth.",
    "Why is the sky blue?": "The air scatters blue light from the sun more than other colors, so the sky looks blue.",
    "Where does the sun rise?": "The sun rises in the east.",
    "Where does the sun set?": "The sun sets in the west.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "Who was the first person on the moon?": "Neil Armstrong was the first person on the moon, in 1969.",
    "Who invented the light bulb?": "Thomas Edison is known for the light bulb.",
    "Who discovered gravity?": "Isaac Newton described gravity.",
    "Who was Albert Einstein?": "Albert Einstein was a physicist who found the theory of relativity.",
    "What is the speed of light?": "Light travels about 300,000 kilometers per second.",
    "What is the square root of 16?": "The square root of 16 is 4.",
    "What is pi?": "Pi is about 3.14. It is the length around a circle divided by its width.",
    "What is a computer?": "A computer is a machine that follows instructions and works with numbers and text.",
    "What is a GPU?": "A GPU is a processor that does many calculations at once. It is good for pictures and for AI.",
    "What is a language model?": "A language model is a program that writes text, one small piece after another.",
    "What is Python?": "Python is a programming language that is easy to read.",
    "What is AI?": "AI is short for artificial intelligence: programs that do what seems to need thinking.",
    "What is Mico?": "Mico is a gateway. It sends each of your questions to a computer that can answer it soon.",
    "What does Mico do?": "Mico shares the work of answering among many computers, and goes on when one of them fails.",
    "What is a gateway?": "A gateway is a door between two places. Mico is one between you and many models.",
    "What is a token?": "A token is a small piece of text. Models read and write tokens.",
    "Name three fruits.": "Apples, bananas and cherries.",
    "Name three colors.": "Red, green and blue.",
    "Name three animals.": "Cats, dogs and elephants.",
    "Name three vegetables.": "Carrots, peas and potatoes.",
    "Name five countries.": "Brazil, France, India, Japan and Kenya.",
    "Name three planets.": "Mars, Venus and Jupiter.",
    "Name three sports.": "Football, tennis and swimming.",
    "Name three musical instruments.": "The guitar, the piano and the drum.",
    "What are the primary colors?": "The primary colors are red, yellow and blue.",
    "What are the four seasons?": "The four seasons are spring, summer, autumn and winter.",
    "List the days of the week.": ", ".join(DAYS) + ".",
    "List the months.": ", ".join(MONTHS) + ".",
    "List the planets.": ", ".join(PLANETS) + ".",
}  # fmt: skip
JOKES = (
    "Why did the computer go to the doctor? Because it had a virus!",
    "What do you call a sleeping dinosaur? A dino-snore!",
    "Why did the bicycle fall over? It was two tired!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why did the teddy bear say no to dessert? It was stuffed!",
    "What has ears but cannot hear? A cornfield!",
    "Why was the math book sad? It had too many problems!",
    "What do you call cheese that is not yours? Nacho cheese!",
    "Why did the token cross the network? To get to the other site!",
    "What do clouds wear under their clothes? Thunderwear!",
    "Why do bees have sticky hair? They use honeycombs!",
    "How does the ocean say hello? It waves!",
    "What do you get when you cross a snowman and a dog? Frostbite!",
    "Why did the cookie go to the nurse? It felt crummy!",
    "What kind of tree fits in your hand? A palm tree!",
)
POEMS = (
    "The rain is soft, the night is deep,\nthe little town is fast asleep.",
    "Roses are red,\nviolets are blue,\nI am quite small,\nbut I talk to you.",
    "A cat on the wall\nlooks up at the moon, and then\nit jumps after it.",
    "Snow on every tree.\nA small bird sings in the cold,\nand spring hears its song.",
    "The sun goes up, the sun goes down,\nit shines on every field and town.",
)
OPEN_REQUESTS = (
    (JOKES, ("Tell me a joke.", "Tell me a joke", "Make me laugh.", "Say something funny.", "Do you know a joke?",
             "tell me a joke please", "Another joke, please.", "I'm bored.")),
    (POEMS, ("Write a poem.", "Write a short poem.", "Tell me a poem.", "Write me a poem, please.")),
)  # fmt: skip


def draw_fact(rng: random.Random) -> tuple[str, str]:
    """Return one question and its answer."""
    return rng.choice(_MAKERS)(rng)


def exchanges(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield questions with answers; those with few forms repeat."""
    rng = random.Random(seed)
    for _ in range(count):
        yield draw_fact(rng)


def _capital(rng: random.Random) -> tuple[str, str]:
    country, capital = rng.choice(list(CAPITALS.items()))
    ask = ("What is the capital of {}?", "What's the capital of {}?", "capital of {}", "Which city is the capital of {}?",
           "Tell me the capital of {}.", "Do you know the capital of {}?")  # fmt: skip
    if rng.random() < 0.15:
        return f"{capital} is the capital of which country?", f"{capital} is the capital of {country}."
    return rng.choice(ask).format(country), f"The capital of {country} is {capital}."


def _language(rng: random.Random) -> tuple[str, str]:
    country, language = rng.choice(list(LANGUAGES.items()))
    ask = ("What language do people speak in {}?", "Which language is spoken in {}?")
    return rng.choice(ask).format(country), f"In {country}, people speak {language}."


def _opposite(rng: random.Random) -> tuple[str, str]:
    pair = rng.choice(OPPOSITES).split()
    rng.shuffle(pair)
    ask = (
        "What is the opposite of {}?",
        "opposite of {}",
        "Name the opposite of {}.",
        "What is an antonym of {}?",
    )
    return rng.choice(ask).format(pair[0]), f"The opposite of {pair[0]} is {pair[1]}."


def _animal(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        animal, sound = rng.choice(list(SOUNDS.items()))
        ask = rng.choice(("What does a {} say?", "What sound does a {} make?"))
        return _a(ask.format(animal)), _a(f"A {animal} says {sound}.")
    if rng.random() < 0.5:
        animal, baby = rng.choice(list(BABIES.items()))
        return f"What is a baby {animal} called?", f"A baby {animal} is called a {baby}."
    animal, legs = rng.choice(list(LEGS.items()))
    count = NUMBERS[legs] if legs else "no"
    return f"How many legs does {animal} have?", _capital_letter(f"{animal} has {count} legs.")


def _color(rng: random.Random) -> tuple[str, str]:
    thing, color = rng.choice(list(COLORS.items()))
    verb = f"What color is {thing}?"
    return verb, _capital_letter(f"{thing} is {color}.")


def _element(rng: random.Random) -> tuple[str, str]:
    name, symbol = rng.choice(list(ELEMENTS.items()))
    return f"What is the chemical symbol for {name}?", f"The chemical symbol for {name} is {symbol}."


def _order(rng: random.Random) -> tuple[str, str]:
    kind, row = rng.choice((("day", DAYS), ("month", MONTHS), ("planet", PLANETS), ("season", SEASONS)))
    at = rng.randrange(len(row) - 1)
    first, second = row[at], row[at + 1]
    if rng.random() < 0.5:
        return f"What {kind} comes after {first}?", _capital_letter(f"{second} comes after {first}.")
    return f"Which {kind} comes before {second}?", _capital_letter(f"{first} comes before {second}.")


def _sum(rng: random.Random) -> tuple[str, str]:
    kind = rng.randrange(4)
    a, b = (
        (rng.randrange(1, 13), rng.randrange(1, 13))
        if kind == 2
        else (rng.randrange(100), rng.randrange(100))
    )
    if rng.random() < 0.4:
        a, b = a % 13, b % 13
    if kind == 1 and a < b:
        a, b = b, a
    if kind == 3:
        a, b = a * max(1, b % 13), max(1, b % 13)
        a -= a % b
    sign, word, result = (("+", "plus", a + b), ("-", "minus", a - b), ("*", "times", a * b),
                          ("/", "divided by", a // b if kind == 3 else 0))[kind]  # fmt: skip
    ask = ("What is {a} {s} {b}?", "{a} {s} {b}", "{a}{s}{b}", "What is {a} {w} {b}?", "How much is {a} {w} {b}?",
           "Calculate {a} {s} {b}.", "{a} {s} {b} = ?", "what's {a} {s} {b}")  # fmt: skip
    return rng.choice(ask).format(a=a, b=b, s=sign, w=word), f"{a} {sign} {b} = {result}."


def _numbers(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(200), 2)
    kind = rng.randrange(5)
    if kind == 0:
        return f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger than {min(a, b)}."
    if kind == 1:
        return f"Is {a} even or odd?", f"{a} is {'odd' if a % 2 else 'even'}."
    if kind == 2:
        start = a % 50
        return f"Count from {start} to {start + 5}.", ", ".join(str(start + i) for i in range(6)) + "."
    if kind == 3:
        row = rng.sample(range(100), rng.randrange(3, 6))
        listed = ", ".join(str(each) for each in row)
        return f"Sort these numbers: {listed}", ", ".join(str(each) for each in sorted(row))
    at = rng.randrange(len(NUMBERS))
    return f"Write the number {at} as a word.", f"{NUMBERS[at]}".capitalize() + "."


def _copying(rng: random.Random) -> tuple[str, str]:
    sentence = rng.choice((*words.SENTENCES, *words.FEELINGS, *words.TASKS))
    word, name = rng.choice((*words.ANIMALS, *words.FOODS, *words.THINGS)), rng.choice(words.NAMES)
    kind = rng.randrange(7)
    if kind == 0:
        return f"Repeat after me: {sentence}", sentence
    if kind == 1:
        return f"Say {word}.", f"{word.capitalize()}."
    if kind == 2:
        return f"Spell the word {word}.", "-".join(word.upper())
    if kind == 3:
        return f"What is the first letter of {word}?", f"The first letter of {word} is {word[0].upper()}."
    if kind == 4:
        return f"Write {word} in capital letters.", word.upper()
    if kind == 5:
        said = rng.choice(("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}!")).format(name)
        return said, f"Hello {name}! Nice to meet you. How can I help you?"
    names = rng.sample(words.NAMES, 3)
    return f"Sort these names: {', '.join(names)}", ", ".join(sorted(names))


def _known(rng: random.Random) -> tuple[str, str]:
    question, answer = rng.choice(list(KNOWN.items()))
    if rng.random() < 0.25:
        question = rng.choice((question.lower(), question.rstrip("?."), "Please tell me: " + question))
    return question, answer


def _open(rng: random.Random) -> tuple[str, str]:
    answers, requests = rng.choice(OPEN_REQUESTS)
    return rng.choice(requests), rng.choice(answers)


def _capital_letter(text: str) -> str:
    return text[0].upper() + text[1:]


def _a(text: str) -> str:
    return text.replace("a owl", "an owl").replace("A owl", "An owl")


_MAKERS = (_capital, _capital, _language, _opposite, _animal, _color, _element, _order, _sum, _sum, _sum, _numbers,
           _copying, _copying, _known, _known, _known, _open)  # fmt: skip
