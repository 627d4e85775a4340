"""Random values of people and machines, made from the standards' own descriptions.

Shares nothing with the patterns that look for them: prefixes, lengths and check digits are written down here a second
time. Nothing is anybody's: names and domains are made up, digits and keys are random.
"""

import string
from collections.abc import Callable
from random import Random
from urllib.parse import quote

Maker = Callable[[Random], str]

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
HEX = "0123456789abcdef"

FIRST = "anneke bogdan celestine dorit emeka friedhelm guadalupe hedda ilse joaquin katell lorenz maelle nuria".split()
LAST = "abendrot brisenval castelmur dornfeldt esquivar fenwickson grunhagen halvorsby iturrondo kesselbaum".split()
COMPANIES = (
    "nordlicht-textil kupferkessel bluefjord quillandink orchardtools lumenwerk tresrios papeterie-du-quai".split()
)
TOP_LEVELS = "com de fr es org net io co.uk com.mx app dev shop photography solutions museum berlin eu".split()

PHONES_INTERNATIONAL = (
    "+1 212 N## #### | +1 (415) N##-#### | +1-312-N##-#### | +1617N###### | +1.206.N##.#### | +44 20 7### #### | "
    "+44 7812 ###### | +447400###### | +44 (0)161 4## #### | +49 30 N####### | +49 (0)151 N####### | +49-89-N###### | "
    "+49 171 N######| +49176N####### | +49 221/N##### | +33 6 ## ## ## ## | +33612###### | +33 (0)1 4# ## ## ## | "
    "+33.6.3#.##.##.## | +34 612 ### ### | +34 91 4## ## ## | +346######## | +39 06 698# #### | +39 347 N## #### | "
    "+41 44 6## ## ## | +41 79 2## ## ## | +43 1 58#####| +43 664 N###### | +31 6 2# ## ## ## | +31 20 6## ####| "
    "+46 70 2## ## ## | +48 512 ### ### | +351 912 ### ### | +91 98### ##### | +55 11 98### #### | +61 412 ### ### | "
    "+81 90 N### #### | +52 55 5### #### | +45 20 ## ## ## | +353 87 2## ####"
)
PHONES_NATIONAL = {
    "US": "(212) N##-#### | 415-N##-#### | 312.N##.#### | 617 N## #### | 1-617-N##-#### | (303)N##-####",
    "GB": "020 7### #### | 07812 ###### | 07400 ### ### | 0161 4## #### | (0121) 4## #### | 01223 3#####",
    "DE": "030 N####### | 0151 N####### | 0171/N###### | 089-N###### | (0221) N##### | 0711 / N## ## ##",
    "FR": "06 1# ## ## ## | 01 4# ## ## ## | 07.8#.##.##.## | 06-3#-##-##-## | 0612###### | 04 7# ## ## ##",
    "ES": "612 ### ### | 91 4## ## ## | 655 ## ## ## | 93 2## ## ##",
}
CARD_PREFIXES = {  # brand: (prefixes, number of digits, groups)
    "visa": (("4",), 16, (4, 4, 4, 4)),
    "mastercard": (("51", "52", "53", "54", "55"), 16, (4, 4, 4, 4)),
    "mastercard_2": (("2221", "2345", "2518", "2699", "2720"), 16, (4, 4, 4, 4)),
    "amex": (("34", "37"), 15, (4, 6, 5)),
    "discover": (("6011", "644", "65"), 16, (4, 4, 4, 4)),
    "jcb": (("3528", "3545", "3589"), 16, (4, 4, 4, 4)),
    "diners": (("300", "305", "36", "38"), 14, (4, 6, 4)),
    "unionpay": (("622126", "622700", "6250"), 16, (4, 4, 4, 4)),
}
IBANS = {  # country: the BBAN, # a digit, A a capital letter, X either (ISO 13616 registry)
    "DE": "#" * 18,
    "AT": "#" * 16,
    "CH": "#" * 5 + "X" * 12,
    "NL": "AAAA" + "#" * 10,
    "GB": "AAAA" + "#" * 14,
    "IE": "AAAA" + "#" * 14,
    "LU": "###" + "X" * 13,
    "DK": "#" * 14,
    "SE": "#" * 20,
    "ES": "ES",
    "FR": "FR",
    "BE": "BE",
}


def drawn(rng: Random, alphabet: str, count: int) -> str:
    """So many random characters of an alphabet."""
    return "".join(rng.choices(alphabet, k=count))


def filled(rng: Random, pattern: str) -> str:
    """The pattern with # a digit, N a digit of 2 to 9, A a capital letter, X a digit or capital letter."""
    kinds = {
        "#": string.digits,
        "N": "23456789",
        "A": string.ascii_uppercase,
        "X": string.digits + string.ascii_uppercase,
    }
    return "".join(rng.choice(kinds[c]) if c in kinds else c for c in pattern)


def alternative(rng: Random, alternatives: str) -> str:
    """One of the patterns that | separates, filled."""
    return filled(rng, rng.choice(alternatives.split("|")).strip())


# Contact


def email(rng: Random) -> str:
    """An address as people and systems have them."""
    first, last, company = rng.choice(FIRST), rng.choice(LAST), rng.choice(COMPANIES)
    number, tag = rng.randint(1, 99), rng.choice(["news", "shop", "ci"])
    plain = [f"{first}.{last}", f"{first[0]}{last}", f"{last}{number}", f"{first}+{tag}", f"{first}_{last}", first]
    local = rng.choice([*plain, f"{first.title()}.{last.title()}", f"{first}-{last}", f"o'{last}"])
    domain = rng.choice([company, f"mail.{company}", f"{company}{rng.randint(1, 9)}", f"eu.support.{company}"])
    if rng.random() < 0.04:
        domain = rng.choice(["bäckerei-sonnental", "xn--caf-dma-rivage", "señal-norte"])
    return f"{local}@{domain}.{rng.choice(TOP_LEVELS)}"


def phone(rng: Random) -> str:
    """A number with + and the country's code."""
    return alternative(rng, PHONES_INTERNATIONAL)


# Money


def luhn_digit(digits: str) -> int:
    """The check digit that ISO/IEC 7812-1 appends."""
    doubled = [int(d) * (2 if i % 2 == 0 else 1) for i, d in enumerate(reversed(digits))]
    return -sum(d - 9 if d > 9 else d for d in doubled) % 10


def card(rng: Random, *, wrong: int = 0) -> str:
    """A card's number, in one piece or in the groups printed on it; its check digit is off by `wrong`."""
    prefixes, length, groups = CARD_PREFIXES[rng.choice(list(CARD_PREFIXES))]
    prefix = rng.choice(prefixes)
    body = prefix + drawn(rng, string.digits, length - 1 - len(prefix))
    number, separator = body + str((luhn_digit(body) + wrong) % 10), rng.choice(["", " ", " ", "-"])
    ends = [sum(groups[: i + 1]) for i in range(len(groups))]
    return separator.join(number[end - size : end] for end, size in zip(ends, groups, strict=True))


def bban(rng: Random, country: str) -> str:
    """A country's account number, with its own check digits where it has some that are simple."""
    if country == "ES":
        bank, account = drawn(rng, string.digits, 8), drawn(rng, string.digits, 10)
        weights = (1, 2, 4, 8, 5, 10, 9, 7, 3, 6)
        sums = (sum(w * int(d) for w, d in zip(weights, part, strict=True)) % 11 for part in ("00" + bank, account))
        return bank + "".join({11: "0", 10: "1"}.get(11 - s, str(11 - s)) for s in sums) + account
    if country == "FR":
        bank, branch, account = (drawn(rng, string.digits, size) for size in (5, 5, 11))
        return f"{bank}{branch}{account}{97 - (89 * int(bank) + 15 * int(branch) + 3 * int(account)) % 97:02}"
    if country == "BE":
        account = drawn(rng, string.digits, 10)
        return f"{account}{int(account) % 97 or 97:02}"
    return filled(rng, IBANS[country])


def iban(rng: Random, *, wrong: int = 0) -> str:
    """An account's number, in one piece or in fours; its check digits are off by `wrong` (1 to 96)."""
    country = rng.choice(list(IBANS))
    account = bban(rng, country)
    check = 98 - int("".join(str(int(c, 36)) for c in f"{account}{country}00")) % 97
    number = f"{country}{(check - 2 + wrong) % 97 + 2:02}{account}"
    return number if rng.random() < 0.5 else " ".join(number[i : i + 4] for i in range(0, len(number), 4))


# Machines


def ipv4(rng: Random) -> str:
    """An address of a private or a public network."""
    a, b, c, d = (rng.randint(1, 254) for _ in range(4))
    return rng.choice(
        [f"192.168.{c}.{d}", f"10.{b}.{c}.{d}", f"172.{16 + b % 16}.{c}.{d}"] + [f"{50 + a % 77}.{b}.{c}.{d}"] * 3
    )


def ipv6(rng: Random) -> str:
    """An address, written in full or with its zeros left out."""
    h = [f"{rng.randint(0x100, 0xFFFF):x}" for _ in range(8)]
    network = rng.choice(["2a02", "2001", "2600", "2a00", "fd12"])
    whole = ":".join([network, *h[:7]])
    short = [f"{network}:{h[0]}:{h[1]}::{h[2]}", f"{network}:{h[0]}::1", f"{network}:{h[0]}:{h[1]}:{h[2]}::"]
    middle = f"{network}:{h[0]}:0:0:{':'.join(h[:4])}"
    return rng.choice([whole, *short, middle, whole.upper(), short[0].upper(), f"fe80::{':'.join(h[:4])}"])


# Secrets without a shape of their own


def password(rng: Random, symbols: str = "!?*%+=^~") -> str:
    """What people choose and what generators give; no blank, quote, backslash or #."""
    word = rng.choice("Winter harbour Maulwurf quesadilla Tournesol kitten gravel Zeppelin pomelo orage".split())
    chosen = [f"{word}{rng.randint(10, 2999)}{rng.choice(symbols)}", f"{word}-{rng.choice(LAST)}-{rng.randint(2, 99)}"]
    chosen.append(f"{word.replace('e', '3').replace('o', '0')}_{rng.randint(10, 99)}")
    made = drawn(rng, BASE62, 6) + rng.choice(symbols) + drawn(rng, BASE62 + "!_-.", rng.randint(4, 12)) + "z"
    return rng.choice([*chosen, drawn(rng, BASE62, rng.randint(10, 24)), made])


def url_password(rng: Random) -> str:
    """A password as it stands in an address: what is reserved there is percent-encoded."""
    return quote(rng.choice([drawn(rng, BASE62, rng.randint(8, 28)), f"{drawn(rng, BASE62, 5)}@7q", password(rng)]))


VALUES: dict[str, Maker] = {
    "email": email,
    "phone": phone,
    "card": card,
    "iban": iban,
    "ipv4": ipv4,
    "ipv6": ipv6,
    "url_credentials": url_password,
    "password": password,
    "password_command": lambda r: password(r, "!+=^"),
    "password_prose": password,
    **{f"phone_national_{region}": (lambda r, p=p: alternative(r, p)) for region, p in PHONES_NATIONAL.items()},
}
