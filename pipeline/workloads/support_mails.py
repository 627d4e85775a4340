"""The mails that customers write to a small outdoor shop, whose assistant answers in a house style."""

import random
from collections.abc import Iterator

from pipeline.workloads import Request

SYSTEM = "Answer our customers' mails."
# One answered mail shows the house style: a small target follows an example where it would ignore a rule.
EXAMPLE = (
    {"role": "user", "content": "My Polar mug, order R10001, has a crack. Ada"},
    {
        "role": "assistant",
        "content": "Dear Ada,\nthank you for your mail about order R10001, the Polar mug. "
        "We will check it and write to you today.\nKind regards,\nRidgeline Outdoor",
    },
)
MAX_TOKENS = 48

_SAMPLED_SHARE = 0.15
_SECOND_MAIL_SHARE = 0.1
_TYPO_SHARE = 0.2
_MOOD_SHARE = 0.25

_FIRST = (
    "Anna Ben Carla David Elif Farid Greta Hassan Ines Jonas Kavya Leo Marta Nils Olga Pablo Quentin Rosa Samir Tess "
    "Uma Viktor Wanda Xenia Yusuf Zoe Aiko Bruno Chidi Dora Emil Fatima Gwen Hugo Irene Jakub Kira Luca Mei Noor"
).split()
_LAST = (
    "Alvarez Becker Chen Dubois Eriksen Fischer Garcia Haddad Ivanova Jensen Kowalski Lindqvist Moreau Nakamura Okafor "
    "Petrov Quinn Rossi Schmidt Tanaka Usman Varga Weber Yilmaz Zhang Andersson Brandt Costa Dvorak Ferreira"
).split()
PRODUCTS = (
    "Fjord two-person tent",
    "Tarn down sleeping bag",
    "Kestrel 45 litre backpack",
    "Granite hiking boots",
    "Drizzle rain jacket",
    "Ember gas stove",
    "Lumen headlamp",
    "Merino base layer",
    "Ridge trekking poles",
    "Cove dry bag",
    "Alder wool socks",
    "Scree trail shoes",
    "Birch camping chair",
    "Pebble water filter",
    "Summit fleece",
    "Halo sleeping mat",
    "Larch cooking set",
    "Thistle winter gloves",
    "Moss hammock",
    "Otter kayak vest",
    "Falcon climbing harness",
    "Heron softshell trousers",
    "Bracken day pack",
    "Cinder insulated bottle",
)
_COLOURS = "green blue grey black orange red sand navy".split()
_SIZES = "XS S M L XL 38 40 42 44".split()
_MONTHS = "January February March April May June July August September October November December".split()
_TRIPS = (
    "a week in the Alps",
    "my daughter's school trip",
    "a canoe tour",
    "our first trek with the dog",
    "a birthday present",
    "two nights on the coast",
    "a long walk across Scotland",
    "our summer camp",
    "a winter hike",
    "my brother's wedding gift",
)
_STREETS = "Mill Lane|Harbour Road|Station Street|Oak Avenue|Church Hill|Garden Way|Bridge Street|North Parade".split(
    "|"
)

# Topic → what happened, and what the customer asks for. Both are filled from one order.
_TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "late_delivery": (
        (
            "I ordered the {product} on {date} and it still has not arrived.",
            "My order {order}, the {product}, should have been here on {date}.",
            "The tracking page for order {order} has shown the same line for {days} days, and there is no {product}.",
            "It is now {days} days past the promised date and I am still waiting for my {product}.",
        ),
        (
            "When will it arrive?",
            "Can you find out where the parcel is?",
            "Please tell me the new delivery date.",
            "Should I keep waiting or will you send another one?",
        ),
    ),
    "return": (
        (
            "The {product} arrived on {date}, but it is not what I had in mind.",
            "I would like to return the {product} from order {order}.",
            "I have not used the {product} and all the labels are still on it.",
            "We now have two of the {product}, because my partner bought one as well.",
        ),
        (
            "How do I send it back?",
            "Can you mail me a return label?",
            "Do I have to pay for the return?",
            "How many days do I have left to return it?",
        ),
    ),
    "refund": (
        (
            "I sent the {product} back on {date} and have not seen my money.",
            "You confirmed the return of the {product} {days} days ago.",
            "For order {order} I was charged {price} euros twice.",
            "I cancelled the {product} on {date}, but the {price} euros were still taken from my card.",
        ),
        (
            "When do I get my money back?",
            "Please refund the {price} euros.",
            "Could you check the refund for me?",
            "To which account will you pay it?",
        ),
    ),
    "damaged_item": (
        (
            "The {product} came out of the box with a {damage}.",
            "When I opened the parcel on {date}, I saw a {damage} on the {product}.",
            "There is a {damage} on my new {colour} {product}.",
            "The box was crushed and the {product} inside has a {damage}.",
        ),
        (
            "Can I get a new one?",
            "I can send photos if you need them.",
            "Please tell me what to do now.",
            "Will you replace it or do I have to send it back first?",
        ),
    ),
    "wrong_size": (
        (
            "I ordered the {product} in {size}, and it is too small.",
            "You sent me the {product} in the wrong size: I asked for {size}.",
            "The {product} in {size} is far too wide for me.",
            "The {colour} {product} fits everywhere but at the shoulders, so {size} was the wrong choice.",
        ),
        (
            "Can I swap it for the next size?",
            "Do you still have another size in {colour}?",
            "How does an exchange work?",
            "Please reserve the other size for me.",
        ),
    ),
    "invoice": (
        (
            "I need an invoice for order {order}, the {product}.",
            "The invoice for the {product} shows the wrong company name.",
            "I bought the {product} on {date} for my club and have no receipt.",
            "Our accountant asks for the tax number on the bill for the {product}.",
        ),
        (
            "Could you send it as a PDF?",
            "Please correct it and mail it to me.",
            "Can you put {name} and {street} {number} on it?",
            "I need it before the end of {month}.",
        ),
    ),
    "warranty": (
        (
            "After {days} days of use the {product} has a {damage}.",
            "I bought the {product} last {month} and the zip is broken already.",
            "My {product} stopped working in the middle of {trip}.",
            "A seam of the {colour} {product} came open, and I treat my things well.",
        ),
        (
            "Is this covered by the warranty?",
            "Can you repair it?",
            "How long is the warranty on it?",
            "What do you need from me for a claim?",
        ),
    ),
    "product_question": (
        (
            "I am thinking about the {product} for {trip}.",
            "I already have the {product} from order {order} and have a question.",
            "Before {trip} I want to be sure about the {product}.",
            "A friend recommended your {product} in {colour}.",
        ),
        (
            "How much does it weigh?",
            "Is it waterproof?",
            "Can I wash it in the machine?",
            "Does it work below zero degrees?",
            "Which size should I take if I am {height} cm tall?",
            "Is it fine for children?",
        ),
    ),
    "address_change": (
        (
            "I moved last week and order {order} is still going to my old flat.",
            "I typed the wrong house number for the {product}.",
            "We will be away on {date}, so nobody can take the {product}.",
            "Please send the {product} to my office instead.",
        ),
        (
            "The new address is {street} {number}.",
            "Can you change it to {street} {number}?",
            "Is it too late to change the address?",
            "Please confirm that it will go to {street} {number}.",
        ),
    ),
    "discount_code": (
        (
            "The code {code} did not work when I ordered the {product}.",
            "I forgot to enter my code {code} for order {order}.",
            "Your newsletter promised {percent} percent off the {product}, but I paid the full price.",
            "The shop says that {code} has expired, though the mail says it is valid until {date}.",
        ),
        (
            "Can you still take it off?",
            "Please apply it to my order.",
            "Could I have a new code?",
            "Why was it refused?",
        ),
    ),
    "cancel_order": (
        (
            "I ordered the {product} this morning by mistake.",
            "I found out that I already own a {product}.",
            "Our plans changed, {trip} is off, and I no longer need the {product}.",
            "Order {order} has not been sent yet, as far as I can see.",
        ),
        (
            "Please cancel it.",
            "Can I still cancel?",
            "Could you stop the parcel?",
            "Is there a fee for cancelling?",
        ),
    ),
    "missing_part": (
        (
            "The {product} arrived without its {part}.",
            "I unpacked the {product} on {date}, and the {part} is missing.",
            "The list in the box names a {part}, but there is none with my {product}.",
            "Everything in order {order} is fine except that the {part} was not there.",
        ),
        (
            "Can you send it to me?",
            "Can I buy the {part} alone?",
            "I need it for {trip}.",
            "Please check and let me know.",
        ),
    ),
}
_DAMAGES = "long scratch|torn seam|broken buckle|hole near the top|bent pole|loose strap|cracked lid|dark stain".split(
    "|"
)
_PARTS = "carry bag|repair kit|spare strap|manual|care kit|storage bag|warranty card|spare buckle".split("|")
_GREETINGS = ("Hello,", "Hi,", "Good morning,", "Dear team,", "Hi there,", "Dear Ridgeline team,", "", "", "", "")
_REFERENCES = (
    "My order number is {order}.",
    "Order {order}.",
    "It is order {order}.",
    "Reference: {order}.",
)
_MOODS = (
    "I am a bit disappointed.",
    "I have been a happy customer for years.",
    "This is the second time, and I am getting annoyed.",
    "No hurry.",
    "It is urgent, since I need it for {trip}.",
    "I bought it for {trip}.",
    "Sorry to bother you.",
    "The {colour} one is lovely, by the way.",
    "I tried to call, but nobody picked up.",
    "I could not find an answer on your site.",
)
_CLOSINGS = ("Thanks, {name}", "Best, {name}", "Kind regards, {full}", "{full}", "Thank you! {name}", "Cheers, {name}")
_REMINDERS = (
    "I wrote on {date} and have not heard back.",
    "This is my second mail.",
    "Following up on my last message.",
    "Any news?",
)


def prompts(n: int, seed: int) -> Iterator[Request]:
    """``n`` requests with no two texts alike; a tenth are a second mail about the order before."""
    rng = random.Random(f"support_mails {seed}")
    seen: set[str] = set()
    conversations = 0
    topic, facts = "", {}
    while len(seen) < n:
        again = bool(seen) and rng.random() < _SECOND_MAIL_SHARE
        if not again:
            topic, facts = rng.choice(tuple(_TOPICS)), _facts(rng)
            conversations += 1
        mail = _mail(rng, topic, facts, again=again)
        if mail in seen:
            continue
        seen.add(mail)
        yield Request(
            conversation=f"support-{seed}-{conversations:05d}",
            slice=topic,
            messages=[{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": mail}],
            max_tokens=MAX_TOKENS,
            temperature=0.7 if rng.random() < _SAMPLED_SHARE else 0.0,
        )


def _facts(rng: random.Random) -> dict[str, str]:
    name = rng.choice(_FIRST)
    return {
        "name": name,
        "full": f"{name} {rng.choice(_LAST)}",
        "product": rng.choice(PRODUCTS),
        "order": f"R{rng.randrange(10_000, 100_000)}",
        "date": f"{rng.randrange(1, 29)} {rng.choice(_MONTHS)}",
        "month": rng.choice(_MONTHS),
        "days": str(rng.randrange(3, 40)),
        "size": rng.choice(_SIZES),
        "colour": rng.choice(_COLOURS),
        "price": str(rng.randrange(12, 340)),
        "percent": str(rng.randrange(1, 6) * 5),
        "code": f"{rng.choice(('TRAIL', 'HIKE', 'CAMP', 'PEAK'))}{rng.randrange(5, 40)}",
        "street": rng.choice(_STREETS),
        "number": str(rng.randrange(1, 120)),
        "height": str(rng.randrange(150, 200)),
        "damage": rng.choice(_DAMAGES),
        "part": rng.choice(_PARTS),
        "trip": rng.choice(_TRIPS),
    }


def _mail(rng: random.Random, topic: str, facts: dict[str, str], *, again: bool) -> str:
    situations, asks = _TOPICS[topic]
    happened, mood = rng.choice(situations), rng.choice(_MOODS) if rng.random() < _MOOD_SHARE else ""
    # Every mail names its order and its product somewhere, since the house style repeats both.
    reference = "" if "{order}" in happened and "{product}" in happened else rng.choice(_REFERENCES)
    if "{product}" not in happened + reference:
        reference = "It is about the {product}, order {order}."
    elif "{order}" in happened:
        reference = ""
    middle = [happened, reference] if rng.random() < 0.6 else [reference, happened]
    if rng.random() < 0.4:
        middle.insert(0, mood)
    else:
        middle.append(mood)
    if again:
        middle.insert(0, rng.choice(_REMINDERS))
    body = " ".join(part for part in [*middle, rng.choice(asks)] if part).format_map(facts)
    if rng.random() < _TYPO_SHARE:
        body = _with_typo(rng, body)
    greeting, closing = rng.choice(_GREETINGS), rng.choice(_CLOSINGS).format_map(facts)
    return "\n".join(part for part in (greeting, body, closing) if part)


def _with_typo(rng: random.Random, text: str) -> str:
    """The text with two neighbouring small letters swapped, or one dropped; names and numbers stay whole."""
    places = [i for i in range(1, len(text) - 2) if text[i - 1 : i + 2].isalpha() and text[i - 1 : i + 2].islower()]
    at = rng.choice(places)
    if rng.random() < 0.5:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at + 1 :]
