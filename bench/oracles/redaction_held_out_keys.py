"""Random keys and tokens, of the prefixes, alphabets, lengths and checksums that their vendors describe."""

import base64
import json
import string
import zlib
from random import Random

from bench.oracles.redaction_held_out_values import BASE62, HEX, Maker, drawn

BASE64URL = BASE62 + "-_"
PEM_LABELS = {  # label: how its DER begins
    "RSA PRIVATE KEY": "MIIEpAIBAAKCAQEA",
    "EC PRIVATE KEY": "MHcCAQEEI",
    "PRIVATE KEY": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "ENCRYPTED PRIVATE KEY": "MIIFLTBXBgkqhkiG9w0BBQ0wSjApBgkqhkiG9w0BBQww",
    "OPENSSH PRIVATE KEY": "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAAB",
}


def base62_checksum(body: str) -> str:
    """The last six characters of GitHub's and npm's tokens: CRC-32 of the rest, in base 62."""
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(6):
        number, digit = divmod(number, 62)
        digits = BASE62[digit] + digits
    return digits


def github_classic(rng: Random) -> str:
    """ghp_ and its four relatives."""
    body = drawn(rng, BASE62, 30)
    return rng.choice(["ghp_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"]) + body + base62_checksum(body)


def npm(rng: Random) -> str:
    """An access token of the npm registry."""
    body = drawn(rng, BASE62, 30)
    return f"npm_{body}{base62_checksum(body)}"


def slack(rng: Random) -> str:
    """A bot's, user's or app's token."""
    team, user = (str(rng.randint(10**10, 10**13 - 1)) for _ in range(2))
    bot = f"xoxb-{team}-{user}-{drawn(rng, BASE62, 24)}"
    person = f"xoxp-{team}-{user}-{user[::-1]}-{drawn(rng, HEX, 32)}"
    app = f"xapp-1-A0{drawn(rng, string.digits + string.ascii_uppercase, 9)}-{team}-{drawn(rng, HEX, 64)}"
    return rng.choice([bot, person, app])


def slack_webhook(rng: Random) -> str:
    """The address that lets one post into a channel."""
    upper = string.digits + string.ascii_uppercase
    team, bot = (drawn(rng, upper, 9) for _ in range(2))
    return f"https://hooks.slack.com/services/T0{team}/B0{bot}/{drawn(rng, BASE62, 24)}"


def stripe(rng: Random) -> str:
    """A secret or restricted key, live or test, old or new length."""
    prefix = rng.choice(["sk_live_", "sk_live_", "sk_test_", "rk_live_", "rk_test_"])
    return prefix + drawn(rng, BASE62, rng.choice([24, 99]))


def openai(rng: Random) -> str:
    """A user's, project's or service account's key."""
    kind, size = rng.choice([("sk-", 20), ("sk-proj-", 74), ("sk-proj-", 58), ("sk-svcacct-", 74)])
    alphabet = BASE62 if size == 20 else BASE64URL
    return f"{kind}{drawn(rng, alphabet, size)}T3BlbkFJ{drawn(rng, alphabet, size - 1)}{drawn(rng, BASE62, 1)}"


def jwt(rng: Random) -> str:
    """A signed token: header, claims, signature."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")

    header = {"alg": rng.choice(["HS256", "RS256", "ES256"]), "typ": "JWT"}
    if rng.random() < 0.3:
        header = {"typ": "JWT", "kid": drawn(rng, HEX, 8), **header}
    claims = {"sub": drawn(rng, string.digits, 10), "iat": 1700000000 + rng.randint(0, 10**7), "scope": "orders:read"}
    return f"{part(header)}.{part(claims)}.{drawn(rng, BASE64URL, rng.choice([42, 85, 341]))}A"


def private_key(rng: Random) -> str:
    """A whole PEM block."""
    label = rng.choice(list(PEM_LABELS))
    body = PEM_LABELS[label] + drawn(rng, BASE62 + "+/", rng.randint(3, 20) * 64 + 10) + "=="
    lines = [body[i : i + 64] for i in range(0, len(body), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----"])


TOKENS: dict[str, Maker] = {  # what is known by its own shape
    "aws_access_key_id": lambda r: r.choice(["AKIA", "AKIA", "ASIA"]) + drawn(r, string.ascii_uppercase + "234567", 16),
    "github_classic": github_classic,
    "github_fine_grained": lambda r: f"github_pat_{drawn(r, BASE62, 22)}_{drawn(r, BASE62, 59)}",
    "gitlab": lambda r: (
        r.choice(["glpat-", "glpat-", "gldt-", "glrt-"]) + drawn(r, BASE64URL, 19) + drawn(r, BASE62, 1)
    ),
    "slack": slack,
    "slack_webhook": slack_webhook,
    "stripe": stripe,
    "google_api": lambda r: "AIzaSy" + drawn(r, BASE64URL, 32) + drawn(r, BASE62, 1),
    "openai": openai,
    "anthropic": lambda r: f"sk-ant-{r.choice(['api03', 'api03', 'admin01'])}-{drawn(r, BASE64URL, 93)}AA",
    "npm": npm,
    "sendgrid": lambda r: f"SG.{drawn(r, BASE64URL, 22)}.{drawn(r, BASE64URL, 42)}{drawn(r, BASE62, 1)}",
    "twilio_api_key": lambda r: "SK" + drawn(r, HEX, 32),
    "hugging_face": lambda r: "hf_" + drawn(r, string.ascii_letters, 34),
    "digitalocean": lambda r: "dop_v1_" + drawn(r, HEX, 64),
    "pypi": lambda r: "pypi-AgEIcHlwaS5vcmcC" + drawn(r, BASE64URL, 159) + drawn(r, BASE62, 1),
    "telegram_bot": lambda r: f"{r.randint(10**8, 10**10 - 1)}:AA{drawn(r, BASE64URL, 32)}{drawn(r, BASE62, 1)}",
    "shopify": lambda r: "shpat_" + drawn(r, HEX, 32),
    "google_oauth_secret": lambda r: "GOCSPX-" + drawn(r, BASE64URL, 27) + drawn(r, BASE62, 1),
    "jwt": jwt,
}
NAMED_TOKENS: dict[str, tuple[tuple[str, ...], Maker]] = {  # what only the name before it tells
    "aws_secret_access_key": (
        ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "secretAccessKey"),
        lambda r: drawn(r, BASE62 + "+/", 39) + drawn(r, BASE62, 1),
    ),
    "twilio_auth_token": (("TWILIO_AUTH_TOKEN", "twilio_auth_token", "authToken"), lambda r: drawn(r, HEX, 32)),
    "azure_account_key": (("AccountKey", "AZURE_STORAGE_KEY"), lambda r: drawn(r, BASE62 + "+/", 86) + "=="),
    "generic_api_key": (
        ("API_KEY", "api_key", "apiKey", "SECRET_KEY", "client_secret", "ACCESS_TOKEN", "webhook_secret"),
        lambda r: r.choice([drawn(r, HEX, 40), drawn(r, BASE62, 32), drawn(r, BASE64URL, 42) + "q"]),
    ),
}
