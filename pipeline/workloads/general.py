"""Broad prompts: ten forms over a hundred and more subjects, for a drafter that has seen no one's traffic yet."""

import random
from collections.abc import Callable, Iterator

from pipeline.workloads import Request

SYSTEM = "You are a helpful assistant."
MAX_TOKENS = 96

_SAMPLED_SHARE = 0.15

_SUBJECTS = (
    "photosynthesis|tides|volcanoes|the water cycle|rainbows|gravity|magnets|black holes|the moon's phases|earthquakes|"
    "vaccines|the immune system|sleep|memory|digestion|the heart|vitamins|exercise|stress|allergies|"
    "bread baking|fermentation|coffee|chocolate|olive oil|spices|pasta|cheese|tea|soup|"
    "compound interest|inflation|taxes|budgets|insurance|supply and demand|stock markets|mortgages|pensions|trade|"
    "the printing press|the Silk Road|the Roman roads|the Renaissance|the steam engine|railways|the telephone|maps|"
    "calendars|writing systems|recursion|databases|encryption|compilers|operating systems|search engines|networks|"
    "version control|sorting|neural networks|gardening|compost|bees|earthworms|trees|mushrooms|roses|seeds|pruning|"
    "greenhouses|chess|football|swimming|cycling|running|climbing|rowing|skating|sailing|yoga|jazz|opera|the piano|"
    "drums|choirs|film music|poetry|novels|theatre|painting|friendship|patience|courage|honesty|curiosity|kindness|"
    "teamwork|leadership|humour|gratitude|whales|owls|wolves|ants|octopuses|elephants|penguins|bats|spiders|horses|"
    "bridges|tunnels|lighthouses|castles|windmills|elevators|batteries|solar panels|bicycles|electric cars|deserts|"
    "rainforests|glaciers|rivers|coral reefs|islands|mountains|caves|wetlands|the Arctic|statistics|fractions|geometry|"
    "probability|prime numbers|algebra|logic|graphs|angles|infinity|job interviews|public speaking|note taking|"
    "time management|emails|meetings|negotiation|feedback|mentoring|remote work"
).split("|")
_AUDIENCES = "a child|a beginner|a busy parent|a new colleague|a curious teenager|my grandmother|a tourist".split("|")
_TONES = "friendly|formal|funny|calm|dramatic|plain|hopeful".split("|")
_FUNCTIONS = (
    "reverses a string|counts the vowels in a word|checks whether a number is prime|finds the largest number in a list|"
    "removes duplicates from a list|sums the digits of a number|merges two sorted lists|counts words in a file|"
    "checks whether a word is a palindrome|computes a factorial|returns the n-th Fibonacci number|flattens a list|"
    "converts Celsius to Fahrenheit|groups words by length|finds the most common letter|rotates a list by k places|"
    "computes the average of a list|parses a date like 2024-05-01|validates an email address|transposes a matrix|"
    "finds two numbers that add up to a target|capitalises every word|computes the greatest common divisor|"
    "turns a number into Roman numerals|shuffles a list|reads a CSV file|retries a function three times"
).split("|")
_CODE_LANGUAGES = "Python JavaScript Java C Go Ruby Rust".split()
_LANGUAGES = "French German Spanish Italian Portuguese Dutch".split()
_SENTENCE_PARTS = (
    "My sister|The teacher|Our neighbour|A young doctor|The old captain|The baker|A tall stranger".split("|"),
    "opened the window|bought fresh bread|lost the keys|wrote a long letter|missed the train|fed the cat|found a coin"
    "|painted the door".split("|"),
    "this morning|after dinner|before the storm|on the way home|near the station|without a word|last Sunday".split("|"),
)
_PASSAGE_OPENINGS = (
    "The town of {town} built a new {place} last year.",
    "For ten years people in {town} asked for a {place}.",
    "A small {place} in {town} opened its doors in spring.",
)
_PASSAGE_MIDDLES = (
    "It cost less than planned, since many people helped on weekends.",
    "At first only a few visitors came, and the council thought about closing it.",
    "The work took eight months and was stopped twice by heavy rain.",
    "Children from two schools painted the walls and planted trees around it.",
    "A local family gave the land, and a bank lent the rest of the money.",
    "Some neighbours feared noise and asked for shorter hours.",
)
_PASSAGE_ENDS = (
    "Today it is open six days a week and nearly always full.",
    "Next year the town wants to build a second one.",
    "The mayor calls it the best decision of the decade.",
    "A study found that people there now meet each other more often.",
)
_TOWNS = "Larkfield Hemmel Portsmere Ostra Vellin Graywater Tambury Quillan".split()
_PLACES = "library|swimming pool|market hall|bicycle path|community garden|music school|repair workshop".split("|")
_PAIRS = "a cat and a dog|a teacher and a pupil|two old friends|a robot and a gardener|the sun and the moon".split("|")
_ROUGH = (
    "i think {subject} is very very good and everybody should know it",
    "the thing about {subject} is that it is a thing that people dont get",
    "we was talking about {subject} and then we forgot the time",
    "{subject}, in my opinion, are something which one could say matters",
)


def _subject_form(*templates: str) -> Callable[[random.Random], str]:
    def write(rng: random.Random) -> str:
        return rng.choice(templates).format(
            subject=rng.choice(_SUBJECTS),
            audience=rng.choice(_AUDIENCES),
            tone=rng.choice(_TONES),
            count=rng.randrange(3, 8),
        )

    return write


def _code(rng: random.Random) -> str:
    language, task = rng.choice(_CODE_LANGUAGES), rng.choice(_FUNCTIONS)
    return rng.choice(
        (
            f"Write a {language} function that {task}.",
            f"Show me, in {language}, code that {task}, and explain it.",
            f"I need a short {language} program. It {task}.",
        )
    )


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randrange(12, 400), rng.randrange(3, 60), rng.randrange(2, 12)
    return rng.choice(
        (
            f"What is {a} + {b} * {c}? Explain each step.",
            f"A box holds {b} apples. How many apples are in {c} boxes, if {c} apples in all are bad?",
            f"A train travels {a} km in {c} hours. What is its average speed?",
            f"I have {a} euros and spend {b} euros on each of {c} days. How much is left?",
            f"Divide {a} by {c} and give the remainder.",
            f"What is {b} percent of {a}?",
        )
    )


def _translate(rng: random.Random) -> str:
    language, sentence = rng.choice(_LANGUAGES), " ".join(rng.choice(part) for part in _SENTENCE_PARTS)
    return rng.choice((f'Translate into {language}: "{sentence}."', f'How do you say "{sentence}" in {language}?'))


def _summarise(rng: random.Random) -> str:
    place = {"town": rng.choice(_TOWNS), "place": rng.choice(_PLACES)}
    middles = rng.sample(_PASSAGE_MIDDLES, rng.randrange(1, 4))
    passage = " ".join([rng.choice(_PASSAGE_OPENINGS).format_map(place), *middles, rng.choice(_PASSAGE_ENDS)])
    ask = rng.choice(("Summarise this in one sentence:", "Give the main point of this text:", "Shorten this text:"))
    return f"{ask}\n{passage}"


def _rewrite(rng: random.Random) -> str:
    rough = rng.choice(_ROUGH).format(subject=rng.choice(_SUBJECTS))
    return f'Rewrite this in a {rng.choice(_TONES)} tone: "{rough}"'


def _dialogue(rng: random.Random) -> str:
    return f"Write a short {rng.choice(_TONES)} dialogue between {rng.choice(_PAIRS)} about {rng.choice(_SUBJECTS)}."


_FORMS: dict[str, Callable[[random.Random], str]] = {
    "explain": _subject_form(
        "Explain {subject} to {audience}.",
        "What should one know about {subject}?",
        "How would you describe {subject} in a few sentences?",
        "Why does {subject} matter?",
        "What do people often get wrong about {subject}?",
    ),
    "write": _subject_form(
        "Write a {tone} paragraph about {subject}.",
        "Write the opening of a {tone} story in which {subject} play a part.",
        "Write a {tone} poem about {subject}.",
        "Draft a {tone} letter to the editor about {subject}.",
    ),
    "list": _subject_form(
        "List {count} facts about {subject}.",
        "Give me {count} tips about {subject} for {audience}.",
        "Name {count} questions that {audience} might ask about {subject}.",
    ),
    "brainstorm": _subject_form(
        "Think of {count} titles for a talk about {subject}.",
        "Suggest {count} ways to teach {subject} to {audience}.",
        "Come up with {count} ideas for a {tone} poster about {subject}.",
    ),
    "code": _code,
    "arithmetic": _arithmetic,
    "translate": _translate,
    "summarise": _summarise,
    "rewrite": _rewrite,
    "dialogue": _dialogue,
}


def prompts(n: int, seed: int) -> Iterator[Request]:
    """``n`` requests with no two texts alike, each a conversation of its own."""
    rng = random.Random(f"general {seed}")
    seen: set[str] = set()
    forms = tuple(_FORMS)
    while len(seen) < n:
        form = rng.choice(forms)
        text = _FORMS[form](rng)
        if text in seen:
            continue
        seen.add(text)
        yield Request(
            conversation=f"general-{seed}-{len(seen):05d}",
            slice=form,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            max_tokens=MAX_TOKENS,
            temperature=0.7 if rng.random() < _SAMPLED_SHARE else 0.0,
        )
