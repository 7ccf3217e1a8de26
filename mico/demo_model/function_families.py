"""Functions that the demo model's training data calls: hand-written ones, and the parts of invented ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mico.demo_model import facts, words

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter: its possible names, JSON schema and values. An optional one may go unsaid."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    draw: Draw
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Functions for one purpose. `asks` and `says` name slots by their first names, results as `r`."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    asks: tuple[str, ...]
    result: Draw
    says: tuple[str, ...]


CITIES = list(facts.CAPITALS.values()) + (
    "New York, Los Angeles, Chicago, Boston, San Francisco, Seattle, Miami, Munich, Hamburg, Milan, Barcelona, "
    "Lyon, Zürich, São Paulo, Köln, Málaga, 東京, Mumbai, Shanghai, Osaka, Sydney, Melbourne, Toronto, Zurich, Geneva, Istanbul, Krakow, Porto"
).split(", ")
COUNTRIES = list(facts.CAPITALS)
SURNAMES = "Smith Garcia Kim Novak Rossi Silva Tanaka Weber Okafor Khan Lopez Larsen Dubois Ivanov Chen Patel".split()
SYLLABLES = "ba be bo da de do fa fi ga go ka ki ko la li lo ma mi mo na ne no pa po ra ri ro sa si so ta ti to va vi zo".split()


def one_of(*values: Any) -> Draw:
    """Return a generator that draws one of the values."""
    return lambda rng: rng.choice(values)


def number(low: int, high: int) -> Draw:
    """Return a generator of whole numbers."""
    return lambda rng: rng.randint(low, high)


def decimal(rng: random.Random) -> float:
    """Draw a number with one or two decimals, or none."""
    return rng.choice((round(rng.uniform(0, 200), 1), round(rng.uniform(0, 30), 2), rng.randint(1, 500)))


def invented_word(rng: random.Random) -> str:
    """Draw a word that no text has, for copying."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))


def name_of_person(rng: random.Random) -> str:
    """Draw a first name, or a first name and a surname."""
    first = rng.choice(words.NAMES) if rng.random() < 0.8 else invented_word(rng).capitalize()
    return first if rng.random() < 0.6 else f"{first} {rng.choice(SURNAMES)}"


def city(rng: random.Random) -> str:
    """Draw a city, sometimes an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.85 else invented_word(rng).capitalize()


def date(rng: random.Random) -> str:
    """Draw a date as people and programs write it."""
    return f"20{rng.randint(20, 30)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def clock_time(rng: random.Random) -> str:
    """Draw a time of day."""
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45)):02}"


def email(rng: random.Random) -> str:
    """Draw an address of nobody."""
    return f"{rng.choice(words.NAMES).lower()}@{rng.choice(('example.com', 'example.org', 'mail.test'))}"


def noun(rng: random.Random) -> str:
    """Draw a thing."""
    return rng.choice((*words.ANIMALS, *words.FOODS, *words.THINGS, *words.NATURE, *words.IDEAS))


def code(rng: random.Random) -> str:
    """Draw an identifier of letters and digits."""
    return "".join(rng.choices("ABCDEFGHKLMNPRSTXZ", k=2)) + "".join(
        rng.choices("0123456789", k=rng.randint(3, 6))
    )


def nouns(rng: random.Random) -> list[str]:
    """Draw a list of things."""
    return rng.sample((*words.FOODS, *words.THINGS), rng.randint(2, 4))


def phrase(rng: random.Random) -> str:
    """Draw a short text."""
    return rng.choice((rng.choice(words.TASKS), rng.choice(words.SENTENCES), noun(rng) + " and " + noun(rng)))


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
STRINGS = {"type": "array", "items": STRING}


def enum(*values: str) -> dict[str, Any]:
    """Return the schema of one of several words."""
    return {"type": "string", "enum": list(values)}


def nested(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def slot(names: str, schema: dict[str, Any], draw: Draw, optional: bool = False) -> Slot:
    return Slot(tuple(names.split()), schema, draw, optional)


def asks(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split("|"))


CELSIUS = ("celsius", "fahrenheit")
# fmt: off
FAMILIES = (
    Family(("get_weather", "current_weather", "weather", "getWeather", "lookup_weather", "get_current_weather", "current_weather_tool"),
           ("Get the weather for a city.", "Get the current weather in a given location.", "Current weather at a place."),
           (slot("city location place", STRING, city), slot("unit units", enum(*CELSIUS), one_of(*CELSIUS), True)),
           asks("What is the weather in {city}?|What's the weather like in {city}?|weather in {city}|How is the weather in {city} today?|Is it raining in {city}?|Tell me the weather in {city} in {unit}.|What is the temperature in {city} in {unit}?|How warm is it in {city}?|Do I need an umbrella in {city}?"),
           lambda rng: {"temperature": rng.randint(-10, 38), "condition": rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))},
           asks("It is {r[temperature]} degrees and {r[condition]} in {city}.|The weather in {city} is {r[condition]} with {r[temperature]} degrees.")),
    Family(("add", "add_numbers", "sum", "plus", "adder"), ("Add two numbers.", "Return the sum of a and b.", "Adds two numbers."),
           (slot("a x first", NUMBER, number(0, 999)), slot("b y second", NUMBER, number(0, 999))),
           asks("What is {a} plus {b}?|Add {a} and {b}.|{a} + {b}|Please add {a} to {b}.|What is {a} + {b}?|Calculate {a} + {b}.|How much is {a} plus {b}?"),
           lambda rng: rng.randint(1, 2000), asks("The result is {r}.|{a} plus {b} is {r}.")),
    Family(("multiply", "multiply_numbers", "product", "times"), ("Multiply two numbers.", "Return a times b."),
           (slot("a x first", NUMBER, number(0, 999)), slot("b y second", NUMBER, number(0, 999))),
           asks("What is {a} times {b}?|Multiply {a} by {b}.|{a} * {b}|What is {a} * {b}?|What is {a} multiplied by {b}?"),
           lambda rng: rng.randint(1, 99999), asks("The result is {r}.|{a} times {b} is {r}.")),
    Family(("subtract", "minus", "difference"), ("Subtract b from a.", "Return a minus b."),
           (slot("a x first", NUMBER, number(0, 999)), slot("b y second", NUMBER, number(0, 999))),
           asks("What is {a} minus {b}?|{a} - {b}|Calculate {a} minus {b}."), lambda rng: rng.randint(-900, 900),
           asks("The result is {r}.|{a} minus {b} is {r}.")),
    Family(("calculate", "calculator", "evaluate", "compute"), ("Evaluate an arithmetic expression.", "Calculate an expression."),
           (slot("expression formula input", STRING, lambda rng: f"{rng.randint(1, 99)} {rng.choice('+-*/')} {rng.randint(1, 99)}" + (f" {rng.choice('+-*/')} {rng.randint(1, 99)}" if rng.random() < 0.4 else "")),),
           asks("What is {expression}?|Calculate {expression}.|Compute {expression}|Please evaluate {expression}."),
           lambda rng: rng.randint(1, 9999), asks("{expression} = {r}.|The result is {r}.")),
    Family(("send_email", "sendEmail", "email", "send_mail"), ("Send an email.", "Send an email to an address."),
           (slot("to recipient address", STRING, email), slot("subject title", STRING, noun), slot("body text message", STRING, phrase)),
           asks("Send an email to {to} with the subject {subject} and the text: {body}|Write to {to} about {subject}: {body}|Email {to}, subject {subject}, body {body}"),
           one_of("sent", {"status": "sent"}, "ok"), asks("I have sent the email to {to}.|Done. The email to {to} is sent.")),
    Family(("send_message", "text", "message_contact"), ("Send a message to a person.",),
           (slot("name to person", STRING, name_of_person), slot("text message body", STRING, phrase)),
           asks("Tell {name}: {text}|Send {name} the message: {text}|Text {name} this: {text}"), one_of("sent", "delivered"),
           asks("I have told {name}.|Your message to {name} is sent.")),
    Family(("set_timer", "start_timer", "timer"), ("Set a timer.", "Start a timer for some minutes."),
           (slot("minutes duration time", INTEGER, number(1, 90)),),
           asks("Set a timer for {minutes} minutes.|Timer for {minutes} minutes, please.|Start a {minutes} minute timer."), one_of("ok", "started"),
           asks("The timer is set for {minutes} minutes.|Done: {minutes} minutes.")),
    Family(("set_alarm", "wake_me", "add_alarm"), ("Set an alarm.",), (slot("time at", STRING, clock_time),),
           asks("Wake me at {time}.|Set an alarm for {time}.|I want to get up at {time}."), one_of("ok", "set"), asks("Your alarm is set for {time}.",)),
    Family(("add_reminder", "create_reminder", "remind"), ("Create a reminder.",),
           (slot("text task title", STRING, lambda rng: rng.choice(words.TASKS)), slot("time at when", STRING, clock_time, True)),
           asks("Remind me to {text}.|Remind me to {text} at {time}.|Create a reminder for {time}: {text}"), one_of("ok", "saved"),
           asks("I will remind you to {text}.",)),
    Family(("search", "web_search", "search_web", "google"), ("Search the web.", "Search for a query."), (slot("query q text", STRING, lambda rng: rng.choice((noun(rng), noun(rng) + " in " + city(rng), "how to " + rng.choice(words.TASKS)))),),
           asks("Search for {query}.|Look up {query}.|Search the web for {query}|Find something about {query}."),
           lambda rng: {"results": [f"All about {noun(rng)}", f"A guide to {noun(rng)}"]}, asks("I found: {r[results][0]}.|The first result is {r[results][0]}.")),
    Family(("get_time", "current_time", "time_in"), ("Get the time in a city.",), (slot("city location timezone", STRING, city),),
           asks("What time is it in {city}?|Tell me the time in {city}.|time in {city}"), lambda rng: {"time": clock_time(rng)}, asks("It is {r[time]} in {city}.",)),
    Family(("convert_currency", "exchange", "currency"), ("Convert money from one currency to another.",),
           (slot("amount value", NUMBER, decimal), slot("from from_currency source", STRING, one_of("USD", "EUR", "GBP", "JPY")), slot("to to_currency target", STRING, one_of("CHF", "INR", "CNY", "BRL"))),
           asks("Convert {amount} {from} to {to}.|How much is {amount} {from} in {to}?|What is {amount} {from} in {to}?"), lambda rng: {"amount": decimal(rng)}, asks("{amount} {from} is {r[amount]} {to}.",)),
    Family(("translate", "translate_text"), ("Translate a text.", "Translate text into a language."),
           (slot("text input", STRING, phrase), slot("language target to", STRING, one_of("French", "German", "Spanish", "Italian", "Japanese"))),
           asks("Translate to {language}: {text}|Translate '{text}' into {language}.|How do you say {text} in {language}?"), lambda rng: {"translation": invented_word(rng) + " " + invented_word(rng)}, asks("In {language}: {r[translation]}.",)),
    Family(("play_music", "play_song", "play"), ("Play a song.",), (slot("song title track", STRING, lambda rng: f"{noun(rng)} {rng.choice(('Song', 'Blues', 'Dance'))}".title()), slot("artist by", STRING, name_of_person, True)),
           asks("Play {song}.|Play {song} by {artist}.|I want to hear {song}."), one_of("playing", "ok"), asks("Now playing {song}.",)),
    Family(("book_table", "reserve_table", "book_restaurant"), ("Book a table at a restaurant.",),
           (slot("restaurant name place", STRING, lambda rng: rng.choice(("Luna", "Roma", "The Fox", "Sakura", "Olive", invented_word(rng).capitalize()))), slot("people guests party_size", INTEGER, number(1, 12)), slot("time at", STRING, clock_time)),
           asks("Book a table at {restaurant} for {people} people at {time}.|Reserve a table for {people} at {restaurant}, {time}.|I need a table for {people} at {time} in {restaurant}."), one_of("booked", {"status": "confirmed"}), asks("Your table for {people} at {restaurant} is booked for {time}.",)),
    Family(("get_stock_price", "stock_price", "quote"), ("Get the price of a stock.",), (slot("symbol ticker", STRING, lambda rng: "".join(rng.choices("ABCDEFGHIKLMNOPRSTUVW", k=rng.randint(3, 4)))),),
           asks("What is the stock price of {symbol}?|How much is {symbol}?|Price of {symbol}, please."), lambda rng: {"price": decimal(rng)}, asks("{symbol} is at {r[price]}.|The price of {symbol} is {r[price]}.")),
    Family(("add_to_list", "shopping_list", "add_items"), ("Add items to the shopping list.",), (slot("items things", STRINGS, nouns),),
           asks("Add {items} to my shopping list.|Put {items} on the list.|I need to buy {items}."), one_of("ok", "added"), asks("I have added {items}.",)),
    Family(("set_light", "switch_light", "light"), ("Switch the light in a room.",), (slot("room where", STRING, one_of("kitchen", "bedroom", "bathroom", "living room", "garage", "office")), slot("on enabled", BOOLEAN, one_of(True))),
           asks("Turn on the light in the {room}.|Switch the {room} light on.|Light on in the {room}, please."), one_of("ok", "on"), asks("The light in the {room} is on.",)),
    Family(("lights_off", "set_lamp", "switch_lamp"), ("Switch a lamp on or off.",), (slot("room where", STRING, one_of("kitchen", "bedroom", "bathroom", "living room", "garage", "office")), slot("on enabled", BOOLEAN, one_of(False))),
           asks("Turn off the light in the {room}.|Switch the {room} light off.|Light off in the {room}, please."), one_of("ok", "off"), asks("The light in the {room} is off.",)),
    Family(("get_user", "find_user", "lookup_user"), ("Look up a user by id.",), (slot("user_id id", INTEGER, number(1, 99999)),),
           asks("Who is user {user_id}?|Look up user {user_id}.|Show me the user with the id {user_id}."), lambda rng: {"name": name_of_person(rng), "age": rng.randint(18, 90)}, asks("User {user_id} is {r[name]}, {r[age]} years old.",)),
    Family(("create_event", "add_event", "schedule"), ("Create a calendar event.",), (slot("title name summary", STRING, lambda rng: rng.choice(("Dentist", "Lunch", "Team meeting", "Birthday party", "Concert", "Yoga"))), slot("date day", STRING, date), slot("time at start", STRING, clock_time, True)),
           asks("Add {title} on {date}.|Create an event: {title}, {date} at {time}.|Schedule {title} for {date}.|Put {title} in my calendar on {date} at {time}."), one_of("created", "ok"), asks("{title} is in your calendar on {date}.",)),
    Family(("get_directions", "route", "directions"), ("Get directions between two places.",), (slot("start origin from", STRING, city), slot("destination to end", STRING, city), slot("mode by", enum("car", "train", "bike", "walk"), one_of("car", "train", "bike"), True)),
           asks("How do I get from {start} to {destination}?|Directions from {start} to {destination} by {mode}.|Show me the way from {start} to {destination}."), lambda rng: {"km": rng.randint(2, 900)}, asks("It is {r[km]} km from {start} to {destination}.",)),
    Family(("roll_dice", "roll_die", "dice"), ("Roll a die.",), (slot("sides faces", INTEGER, one_of(4, 6, 8, 10, 12, 20)),),
           asks("Roll a die with {sides} sides.|Roll a {sides} sided die.|Throw a d{sides}."), number(1, 20), asks("You rolled a {r}.",)),
    Family(("random_number", "random_int", "pick_number"), ("Draw a random number.",), (slot("min low lower", INTEGER, number(0, 50)), slot("max high upper", INTEGER, number(51, 999))),
           asks("Give me a random number between {min} and {max}.|Pick a number from {min} to {max}."), number(1, 900), asks("Your number is {r}.",)),
    Family(("count_words", "word_count", "text_length"), ("Count the words of a text.",), (slot("text input", STRING, phrase),),
           asks("How many words are in this text: {text}|Count the words: {text}"), number(2, 20), asks("The text has {r} words.",)),
    Family(("reverse_text", "reverse", "reverse_string"), ("Reverse a text.",), (slot("text input word", STRING, noun),),
           asks("Reverse the word {text}.|What is {text} backwards?|Reverse {text}"), invented_word, asks("Reversed: {r}.",)),
    Family(("get_population", "country_info", "population"), ("Get facts about a country.",), (slot("country name", STRING, lambda rng: rng.choice(COUNTRIES)),),
           asks("How many people live in {country}?|What is the population of {country}?|Tell me about the country {country}."), lambda rng: {"population": f"{rng.randint(1, 300)} million"}, asks("{r[population]} people live in {country}.",)),
    Family(("get_recipe", "find_recipe", "recipe"), ("Find a recipe.",), (slot("dish food name", STRING, lambda rng: rng.choice(words.FOODS)), slot("vegetarian vegan", BOOLEAN, one_of(True), True)),
           asks("Find a recipe with {dish}.|How do I cook {dish}? Find a recipe.|I want a recipe for {dish}."), lambda rng: {"recipe": f"Cook the {rng.choice(words.FOODS)} for {rng.randint(5, 50)} minutes."}, asks("{r[recipe]}",)),
    Family(("place_order", "order", "buy"), ("Order a product.",), (slot("item product name", STRING, noun), slot("quantity count amount", INTEGER, number(1, 30)), slot("size variant", enum("small", "medium", "large"), one_of("small", "medium", "large"), True)),
           asks("Order {quantity} {item}.|I want to buy {quantity} {item}.|Please order {quantity} {size} {item}.|Buy {quantity} {size} {item}."), lambda rng: {"order": code(rng)}, asks("I have ordered {quantity} {item}. Your order number is {r[order]}.",)),
    Family(("track_package", "track", "order_status", "get_order"), ("Find out where a package is.", "Get the status of an order."), (slot("tracking_number order_id id number", STRING, code),),
           asks("Where is my package {tracking_number}?|Track {tracking_number}.|What is the status of order {tracking_number}?"), lambda rng: {"status": rng.choice(("shipped", "delivered", "on its way", "lost"))}, asks("{tracking_number} is {r[status]}.",)),
    Family(("define", "dictionary", "lookup_word"), ("Look up a word.", "Define a word."), (slot("word term", STRING, noun),),
           asks("Define {word}.|What does {word} mean?|Look up the word {word}."), lambda rng: {"definition": f"something like {noun(rng)}"}, asks("{word}: {r[definition]}.",)),
    Family(("save_note", "create_note", "write_note"), ("Save a note.",), (slot("text content body", STRING, phrase), slot("tags labels", STRINGS, lambda rng: rng.sample(words.IDEAS, 2), True)),
           asks("Save a note: {text}|Write this down: {text}|Note with the tags {tags}: {text}"), one_of("saved", "ok"), asks("I have saved your note.",)),
    Family(("read_file", "open_file", "cat"), ("Read a file.",), (slot("path file filename", STRING, lambda rng: f"{rng.choice(('', 'src/', 'docs/', '/tmp/'))}{noun(rng)}.{rng.choice(('txt', 'py', 'md', 'json'))}"),),
           asks("Read {path}.|What is in the file {path}?|Open {path}|Show me {path}."), phrase, asks("The file says: {r}",)),
    Family(("list_files", "ls", "list_dir"), ("List the files of a folder.",), (slot("path folder directory", STRING, lambda rng: rng.choice(("src", "docs", "/tmp", "/home", ".", noun(rng)))),),
           asks("List the files in {path}.|What files are in {path}?|Show the folder {path}."), lambda rng: [f"{noun(rng)}.txt", f"{noun(rng)}.md"], asks("There are {r[0]} and {r[1]}.",)),
    Family(("Person", "save_person", "add_contact"), ("A person.", "Save a person."), (slot("name full_name", STRING, name_of_person), slot("age years", INTEGER, number(1, 99)), slot("city home", STRING, city, True)),
           asks("{name} is {age} years old.|Save {name}, who is {age} and lives in {city}.|{name}, {age} years, from {city}.|My friend {name} is {age}."), one_of("saved", "ok"), asks("I have saved {name}.",)),
    Family(("get_current_date", "today", "ping", "get_status", "health", "list_users"), ("Takes no arguments.", "No parameters."), (),
           asks("Call {fn}.|Use {fn}.|Please run {fn}|What does {fn} return?|What is the value of {fn}()? Use the tool."), lambda rng: rng.choice((date(rng), "ok", code(rng))), asks("The result is {r}.|{fn} returned {r}.")),
)

VERBS = ("get set find make update delete create check start stop open close count show read write fetch apply run "
         "compute magic process load save test move copy rate print lookup").split()  # fmt: skip
OBJECTS = (
    "function value item order score report task ticket invoice room account flight hotel device sensor job game "
    "player level message image video song recipe car bike package user group team class student lesson data "
    "record table row field status price tax rate limit code key token page post comment tag"
).split()
INVENTED_SLOTS = (
    slot("input _input value x n", INTEGER, number(0, 999)), slot("name label title", STRING, name_of_person),
    slot("city place", STRING, city), slot("id user_id number", INTEGER, number(1, 99999)), slot("key code token", STRING, code),
    slot("text message query", STRING, phrase), slot("word topic subject", STRING, noun), slot("amount price total", NUMBER, decimal),
    slot("count limit size", INTEGER, number(1, 100)), slot("date day", STRING, date), slot("color", enum("red", "green", "blue", "black", "white"), one_of("red", "green", "blue", "black", "white")),
    slot("mode level", enum("low", "medium", "high"), one_of("low", "medium", "high")), slot("items tags names", STRINGS, nouns), slot("email to", STRING, email),
    slot("address location", nested(street=STRING, city=STRING), lambda rng: {"street": f"{noun(rng).capitalize()} Street {rng.randint(1, 99)}", "city": city(rng)}),
    slot("range limits", nested(min=INTEGER, max=INTEGER), lambda rng: {"min": rng.randint(0, 50), "max": rng.randint(51, 999)}),
)
