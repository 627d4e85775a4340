"""A workload of another kind than the mails: short notes of orders that become JSON, after one example."""

import json
import random
from collections.abc import Iterator

from pipeline.workloads import Request
from pipeline.workloads.support_mails import PRODUCTS

SYSTEM = "Turn the note into JSON."
MAX_TOKENS = 80
_NAMES = "Ida Marek Sofia Tomas Lena Arun Bea Karim Nora Felix Maya Oskar Priya Enzo Hana Jules".split()
_CITIES = "Bern Lyon Turin Gdansk Porto Utrecht Malmo Graz Cork Tartu Leeds Brno Ghent Split".split()
_CARRIERS = "Nordpost|Swift Parcel|Kite Couriers|Harbor Freight Line".split("|")
_NOTES = (
    "{count} x {product} for {name}, ship to {city} with {carrier}, paid {price} EUR.",
    "{name} from {city} wants {count} pieces of {product}; {carrier} takes it, {price} EUR in all.",
    "Send {product} ({count}) to {name} in {city}. Carrier {carrier}. Total {price} EUR.",
    "Order by {name}: {product}, quantity {count}, {price} EUR, {carrier} to {city}.",
)


def prompts(n: int, seed: int) -> Iterator[Request]:
    """``n`` requests with no two notes alike, each a conversation of its own."""
    rng, seen = random.Random(f"orders {seed}"), set()
    while len(seen) < n:
        facts = _facts(rng)
        note = rng.choice(_NOTES).format_map(facts)
        if note in seen:
            continue
        seen.add(note)
        yield Request(
            conversation=f"orders-{seed}-{len(seen):05d}",
            slice="orders",
            messages=[{"role": "system", "content": SYSTEM}, *_example(), {"role": "user", "content": note}],
            max_tokens=MAX_TOKENS,
            temperature=0.0,
        )


def _facts(rng: random.Random) -> dict[str, str | int]:
    return {
        "count": rng.randrange(1, 12),
        "product": rng.choice(PRODUCTS),
        "name": rng.choice(_NAMES),
        "city": rng.choice(_CITIES),
        "carrier": rng.choice(_CARRIERS),
        "price": rng.randrange(20, 900),
    }


def _example() -> tuple[dict[str, str], dict[str, str]]:
    facts = {"count": 2, "product": "Polar mug", "name": "Ada", "city": "Oslo", "carrier": "Nordpost", "price": 38}
    reply = {"customer": facts["name"], "city": facts["city"], "items": [{"product": facts["product"], "count": 2}]}
    reply |= {"carrier": facts["carrier"], "total": {"amount": facts["price"], "currency": "EUR"}}
    note = {"role": "user", "content": _NOTES[0].format_map(facts)}
    return note, {"role": "assistant", "content": json.dumps(reply)}
