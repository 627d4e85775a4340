"""What people paste that names nobody and opens nothing, and looks as if it did."""

import re
import string
from random import Random

from bench.oracles.redaction_held_out_values import BASE62, HEX, card, drawn, filled, iban, luhn_digit

TRAPS = """
What's the status of order «long»? It was placed on «date».
---
Ist die Bestellung «long» vom «date» schon raus? Sendungsnummer «tracking».
---
Où en est la commande «long» ? Suivi «tracking».
---
¿Dónde está el pedido «long»? Número de seguimiento «tracking».
---
Find me the book with ISBN «isbn», I think it's from «year».
---
Which edition is ISBN-10 «isbn10»? The page says pp. 555-560 and 1998-2004.
---
EAN «ean», was ist das für ein Produkt? Preis «price».
---
After upgrading from version «version» to «version» the build fails. Node is v20.11.1, npm 10.2.4.
---
Assembly 'System.Runtime, Version=«version», Culture=neutral, PublicKeyToken=b03f5f7f11d50a3a' not found
---
Chrome/124.0.«four».«two» vs Edge «version» – which release notes apply?
---
OID 1.3.6.1.4.1.«four».2.1 vs 2.5.29.17: which is the SAN extension?
---
Section «section» of the manual contradicts section «section», which one holds?
---
meeting moved from «date» «time» to «date» «time», update the agenda please
---
Öffnungszeiten: Mo-Fr 08:00-18:30, Sa 09:00-14:00. Mach daraus eine Tabelle.
---
make the buttons «colour», hover «colour», and borders rgba(12, 34, 56, 0.5)
---
git bisect says «sha1» is the first bad commit, reverted in «short_sha»
---
image: registry.internal/api@sha256:«sha256»
how do i pin by tag instead?
---
request «uuid» failed, the retry «uuid» succeeded. Explain idempotency keys.
---
What is «math» * «math» - 3.14159265358979? And the square root of «long»?
---
Solve: x^2 - «two»x + «four» = 0, then integrate sin(2x) from 0 to 1.5707963
---
Is «long» prime? Factor «longer» too.
---
ts=«millis» dur=«four»ms id=«snowflake» what time is that in UTC?
---
Convert these epochs: «epoch», «epoch», «millis»
---
Cuesta «price» y con IVA «price», ¿cuánto es el 21 %?
---
Compare WH-1000XM4, RTX 4090, i7-13700K, ThinkPad T14 Gen 4 and SM-G991B/DS.
---
Part 555-0«three»-A replaces «model»; CAS 7732-18-5; DIN EN ISO 9001:2015.
---
```python
@app.route("/v1/orders/<int:order_id>")
def order(order_id: int, *, limit: int = 100) -> dict:
    return {"id": order_id, "max": 2147483647, "mask": 0xDEADBEEF, "seed": «long»}
```
explain
---
```cpp
std::vector<std::pair<int, int>>::const_iterator it = cache::lookup(key);
face::Bed::add(cafe::seat());
```
why doesn't this compile
---
```ts
interface Login { email: string; password: string; token?: string }
const password = process.env.DB_PASSWORD ?? "";
```
make it a zod schema
---
password = os.environ["DB_PASSWORD"]  # is this safer than a file?
secret = getpass.getpass("Password: ")
---
env:
  - name: DB_PASSWORD
    valueFrom:
      secretKeyRef: {name: orders-db, key: password}
is the indentation ok?
---
DB_PASSWORD=${DB_PASSWORD}
API_KEY=<your api key>
TOKEN=$(cat /run/secrets/token)
how does envsubst treat these?
---
max_tokens=«four», temperature=0.7, top_p=0.95, tokenizer="bert-base-uncased", pad_token_id=50256
---
Write a rule: a password must have 12 characters, a digit and a symbol. Password: required. Token: optional.
---
Passwort vergessen? Schreib eine kurze Hilfeseite. Kennwort: mindestens 12 Zeichen.
---
npm install @babel/core@7.24.«two» react@18.2.0 left-pad@1.3.0
---
systemctl status getty@tty1.service user@1000.service
what are these units
---
In CSS, why does icon@2x.png not load inside @media (min-width: 640px)?
---
git clone git@github.com:acme/orders.git fails, Permission denied (publickey). ssh deploy@build-07 works.
---
$ ssh-keygen -lf key.pub
2048 MD5:«fingerprint» (RSA)
256 SHA256:«b64_43» (ED25519)
---
-----BEGIN CERTIFICATE-----
MIID«b64_60»
«b64_64»
-----END CERTIFICATE-----
how do i see the expiry date
---
-----BEGIN PUBLIC KEY-----
MIIB«b64_60»
-----END PUBLIC KEY-----
---
<img src="data:image/png;base64,iVBORw0KGgo«b64_64»«b64_64»"> shows nothing
---
"integrity": "sha512-«b64_86==»" — what is this field in package-lock.json?
---
The test card «bad_card» is rejected: "Luhn check failed". Why?
---
Validator sagt, Karte «bad_card» sei ungültig. Rechne mir die Prüfziffer vor.
---
Le numéro «bad_card» ne passe pas la clé de Luhn, pourquoi ?
---
Is «bad_iban» a valid IBAN? My checker says the checksum is off.
---
Warum ist «bad_iban» keine gültige IBAN?
---
¿Por qué «bad_iban» no es válido?
---
matrix:
«row»
«row»
transpose it
---
lap times 1:02:03:04, 00:59:58:21 and ratio 16:9:4, average?
---
1 2 3 4 5 6 7 8 9 10 11 12 - continue; and 1000000000, 2000000000, 10000000000
---
| qty | sku | price |
|---|---|---|
| «two» | «model» | «price» |
| «two» | «model» | «price» |
sum it
---
SELECT count(*) FROM orders WHERE id BETWEEN «long» AND «long» AND created_at > '«date»';
---
JIRA-«four», PR #«four», build «long».«two», commit «short_sha»: write release notes
---
Invoice INV-«year»-«long», VAT 19 %, total «price», due «date». Draft a reminder.
---
train loss 0.«long», lr 3e-«two», step «long», seed «four», «three».«three».«three» params
---
Teach me 2FA: is 123456 or «six» a safe code? And why do keys look like sk-... or ghp_xxxx?
---
Wie viel sind «price» in Dollar, und 1.000.000 Yen? Kurs 1,0«four».
---
flight LH«four» «date» gate B«two» seat 12A, layover «time»-«time», how long?
---
kernel: [ 1234.«six»] usb 1-1.2.3.4: new high-speed USB device number 5 using xhci_hcd
---
00000000: 7f45 4c46 0201 0100 0000 0000 0000 0000  .ELF............
00000010: 0300 3e00 0100 0000 «hex4» «hex4» 0000 0000  what am i looking at
---
regex for dd.mm.yyyy please, must match «date» and not 1.2.3 or 99.99.9999
"""


def isbn13(rng: Random) -> str:
    """An ISBN with its check digit, with hyphens or without."""
    body = rng.choice(["9780", "9783", "97910", "9782"])
    body += drawn(rng, string.digits, 12 - len(body))
    number = body + str(-sum(int(d) * (1, 3)[i % 2] for i, d in enumerate(body)) % 10)
    return rng.choice([number, f"{number[:3]}-{number[3]}-{number[4:8]}-{number[8:12]}-{number[12]}"])


def isbn10(rng: Random) -> str:
    """An ISBN of the old length with its check digit, which can be X."""
    body = rng.choice("023") + drawn(rng, string.digits, 8)
    return body + "0123456789X"[-sum(int(d) * (10 - i) for i, d in enumerate(body)) % 11]


def longer(rng: Random, count: int | None = None) -> str:
    """An integer of so many digits, else of 12 to 21, that no card can have."""
    body = rng.choice("123456789") + drawn(rng, string.digits, count - 2 if count else rng.randint(10, 19))
    return body + str((luhn_digit(body) + rng.randint(1, 9)) % 10)


def ean13(rng: Random) -> str:
    """An article's number with its check digit."""
    body = rng.choice(["400", "426", "590", "300", "841", "070"]) + drawn(rng, string.digits, 9)
    return body + str(-sum(int(d) * (1, 3)[i % 2] for i, d in enumerate(body)) % 10)


def date(rng: Random) -> str:
    """A day as one of four languages writes it."""
    y, m, d = rng.randint(1998, 2026), rng.randint(1, 12), rng.randint(1, 28)
    return rng.choice(
        [f"{y}-{m:02}-{d:02}", f"{d:02}.{m:02}.{y}", f"{d:02}/{m:02}/{y}", f"{m}/{d}/{y % 100:02}", f"{d}. {m}. {y}"]
    )


def price(rng: Random) -> str:
    """An amount in one of four countries' forms."""
    whole, cents = rng.randint(1, 9_999_999), rng.randint(0, 99)
    grouped = f"{whole:,}"
    euro = [f"{grouped.replace(',', '.')},{cents:02} €", f"{grouped.replace(',', ' ')},{cents:02} €"]
    swiss = f"{grouped.replace(',', chr(39))}.{cents:02} CHF"
    return rng.choice([f"${grouped}.{cents:02}", *euro, swiss, f"£{whole}", f"EUR {whole}.{cents:02}"])


def clean_value(rng: Random, kind: str) -> str:
    """A look-alike. b64_N is so many characters of base 64."""
    if kind.startswith("b64_"):
        return drawn(rng, BASE62 + "+/", int(kind[4:].rstrip("="))) + "=" * kind.count("=")
    digits = {"two": 2, "three": 3, "four": 4, "six": 6, "long": rng.randint(5, 11)}
    if kind in digits:
        return rng.choice("123456789") + drawn(rng, string.digits, digits[kind] - 1)
    hexes = {"sha1": 40, "short_sha": rng.randint(7, 10), "sha256": 64, "hex4": 4}
    if kind in hexes:
        return drawn(rng, HEX, hexes[kind])
    return {
        "date": date,
        "price": price,
        "isbn": isbn13,
        "isbn10": isbn10,
        "longer": longer,
        "row": lambda r: " ".join(re.findall("....", longer(r, 16))),
        "ean": ean13,
        "time": lambda r: f"{r.randint(0, 23):02}:{r.randint(0, 59):02}" + r.choice(["", f":{r.randint(0, 59):02}"]),
        "year": lambda r: str(r.randint(1950, 2026)),
        "version": lambda r: ".".join(str(r.randint(0, 30)) for _ in range(4)),
        "section": lambda r: ".".join(str(r.randint(1, 9)) for _ in range(r.randint(3, 4))),
        "tracking": lambda r: filled(r, r.choice(["1ZAXXXXXX#########", "RR#########DE", "JJD0###############"])),
        "colour": lambda r: "#" + drawn(r, HEX, r.choice([3, 6, 6, 8])),
        "uuid": uuid,
        "math": lambda r: f"{r.uniform(0, 10000):.{r.randint(2, 12)}f}",
        "millis": lambda r: str(r.randint(1_600_000_000_000, 1_800_000_000_000)),
        "epoch": lambda r: str(r.randint(1_600_000_000, 1_800_000_000)),
        "snowflake": lambda r: str(r.randint(10**17, 2 * 10**18)),
        "model": lambda r: filled(r, r.choice(["AA-####", "A##-###-A", "AAA###X", "##-####-##"])),
        "fingerprint": lambda r: ":".join(drawn(r, HEX, 2) for _ in range(16)),
        "bad_card": lambda r: card(r, wrong=r.randint(1, 9)),
        "bad_iban": lambda r: iban(r, wrong=r.randint(1, 96)),
    }[kind](rng)


def uuid(rng: Random) -> str:
    """A version 4 UUID."""
    h = drawn(rng, HEX, 32)
    return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{rng.choice('89ab')}{h[17:20]}-{h[20:]}"
