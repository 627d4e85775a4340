"""Logs of made-up traffic in three formats, with everything in them counted: what a collector must find again.

Records come from several tenants and subjects in four languages. Among them are exact duplicates and near ones of
earlier prompts, requests that no collector can use, and lines that hold none. The same seed writes the same bytes.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.oracles.traffic_formats import LogFile, Served

FORMATS = ("tap", "litellm", "otel")
START = 1_767_225_600  # 2026-01-01
DAY_S = 86_400
FILES = 4  # a format
SHARES = {"duplicate": 0.10, "near_duplicate": 0.05, "no_consent": 0.02, "unusable": 0.02, "broken_line": 0.01}
_REMEMBERED = 2000

_WORDS = {
    "en": """the parcel order arrived broken yesterday please send another invoice address street delivery driver window
        garden kitchen colour wrong small large return label printer paper account password reset morning evening nobody
        answered phone twice neighbour box heavy glass table lamp chair hose question about warranty price with""",
    "de": """das paket bestellung kam gestern zerbrochen bitte schicken noch eine rechnung adresse straße lieferung
        fahrer fenster garten küche farbe falsch klein groß rücksendung etikett drucker papier konto kennwort morgen
        abend niemand antwortete telefon zweimal nachbar karton schwer glas tisch lampe stuhl frage über garantie""",
    "fr": """le colis commande arrivé hier cassé merci envoyer encore une facture adresse rue livraison chauffeur
        fenêtre jardin cuisine couleur mauvaise petit grand retour étiquette imprimante papier compte changer matin soir
        personne répondu téléphone deux fois voisin boîte lourde verre table lampe chaise question sur garantie prix""",
    "es": """el paquete pedido llegó ayer roto por favor enviar otra factura dirección calle entrega conductor ventana
        jardín cocina color equivocado pequeño grande devolución etiqueta impresora papel cuenta contraseña cambiar
        tarde nadie contestó teléfono dos veces vecino caja pesada vidrio mesa lámpara silla pregunta sobre garantía""",
}
_LANGUAGES = {name: tuple(words.split()) for name, words in _WORDS.items()}
_SYSTEM = "You answer the customers of a shop, briefly and in their language."
_BROKEN = (
    (b'{"messages": [{"role": "user", "content": "cut of', "not_json"),
    (b'["no", "object"]', "not_an_object"),
    (b'{"prompt": "\xff\xfe"}', "not_utf8"),
    (b'{"level": "info", "event": "server started"}', "unknown_format"),
)


@dataclass
class Traffic:
    """What was written. ``rejects`` and ``kept`` are of a collector that takes these sources as they are given here."""

    sources: tuple[dict[str, Any], ...]
    """Tables of collect.sources."""
    counts: Counter[str] = field(default_factory=Counter)
    """records, kept, distinct, duplicates, near_duplicates, unusable, bytes; records by format:NAME and tenant:NAME,
    new prompts by language:CODE."""
    rejects: Counter[str] = field(default_factory=Counter)
    """Reason → lines or records."""
    subjects: set[str] = field(default_factory=set)
    prompts: set[int] = field(default_factory=set)
    """A number for each distinct prompt among those that are kept."""
    latest: float = 0.0
    """The latest time in the logs, in seconds since 1970."""


def write_traffic(
    folder: Path, records: int, *, seed: int, formats: Sequence[str] = FORMATS, num_tenants: int = 5
) -> Traffic:
    """Write so many records below a folder, a folder a format: the tap's plain, LiteLLM's .gz, OpenTelemetry's .zst."""
    rng = random.Random(seed)
    agreed = {name: {} if name == "tap" else {"consent": "all_users_agreed"} for name in formats}
    traffic = Traffic(tuple({"path": str(folder / name), "format": name, **agreed[name]} for name in formats))
    with ExitStack() as stack:
        logs = {name: [LogFile(folder / name, name, n, stack) for n in range(FILES)] for name in formats}
        for number, served in enumerate(_requests(rng, records, num_tenants, traffic)):
            log = logs[formats[number % len(formats)]][rng.randrange(FILES)]
            _write(traffic, served, log, rng)
            if rng.random() < SHARES["broken_line"]:
                raw, reason = rng.choice(_BROKEN)
                log.write_line(raw)
                traffic.rejects[reason] += 1
    traffic.counts["bytes"] = sum(path.stat().st_size for path in folder.rglob("*.*"))
    return traffic


def _requests(rng: random.Random, records: int, num_tenants: int, traffic: Traffic) -> Iterator[Served]:
    """The requests in their order, duplicates and near ones of those before them included."""
    remembered: list[Served] = []
    for number in range(records):
        drawn = rng.random()
        tenant = f"tenant-{min(int(rng.expovariate(0.7)), num_tenants - 1)}"
        subject = f"{tenant}-user-{int(rng.paretovariate(0.8)) % 5000}"
        own = {
            "number": number,
            "prompt": number,
            "ts": START + DAY_S * number / records,
            "tenant": tenant,
            "subject": subject,
        }
        if remembered and drawn < SHARES["duplicate"] + SHARES["near_duplicate"]:
            of = rng.choice(remembered)
            is_near = drawn >= SHARES["duplicate"]
            text = _nearly(of.text, rng) if is_near else of.text
            own["prompt"] = number if is_near else of.prompt
            served = Served(**own, text=text, turns=of.turns, temperature=of.temperature, tools=of.tools, unusable=None)
            kind = "near_duplicates" if is_near else "duplicates"
        else:
            served = _new(rng, own, traffic)
            kind = "unusable" if served.unusable else "distinct"
            if not served.unusable and len(remembered) < _REMEMBERED:
                remembered.append(served)
            elif not served.unusable and rng.random() < 0.05:
                remembered[rng.randrange(_REMEMBERED)] = served
        traffic.counts[kind] += 1
        yield served


def _new(rng: random.Random, own: dict[str, Any], traffic: Traffic) -> Served:
    language = rng.choice(tuple(_LANGUAGES))
    traffic.counts[f"language:{language}"] += 1
    text = f"{_said(rng, language, rng.randrange(40, 90))} {own['number']}"
    turns: tuple[tuple[str, str], ...] = (("system", _SYSTEM),) if rng.random() < 0.5 else ()
    if rng.random() < 0.25:
        turns += (("user", _said(rng, language, 20)), ("assistant", _said(rng, language, 30)))
    unusable = rng.choice(("unsupported_image", "unsupported_n")) if rng.random() < SHARES["unusable"] else None
    return Served(
        **own,
        text=text,
        turns=turns,
        temperature=rng.choice((0.0, 0.5, 1.0)),
        tools=rng.random() < 0.1,
        unusable=unusable,
    )


def _said(rng: random.Random, language: str, words: int) -> str:
    return " ".join(rng.choices(_LANGUAGES[language], k=words))


def _nearly(text: str, rng: random.Random) -> str:
    """The text with one of its words repeated: other words, nearly the same shingles. Another one every time."""
    words = text.split(" ")
    at = rng.randrange(1, len(words) - 1)
    return " ".join([*words[:at], f"{words[at]}-{rng.randrange(10**9)}", *words[at + 1 :]])


def _write(traffic: Traffic, served: Served, log: LogFile, rng: random.Random) -> None:
    has_consent = log.format != "tap" or rng.random() >= SHARES["no_consent"]
    log.write(served, has_consent=has_consent)
    traffic.counts["records"] += 1
    traffic.counts[f"format:{log.format}"] += 1
    traffic.counts[f"tenant:{served.tenant}"] += 1
    traffic.subjects.add(served.subject)
    traffic.latest = max(traffic.latest, served.ts)
    if not has_consent:
        traffic.rejects["no_consent"] += 1
    elif served.unusable:
        traffic.rejects[served.unusable] += 1
    else:
        traffic.counts["kept"] += 1
        traffic.prompts.add(served.prompt)
