import pytest

from bench.oracles.redaction_records import clean, labelled, texts
from pipeline import phones
from pipeline.credentials import Credentials
from pipeline.errors import ConfigError
from pipeline.phones import PhoneRecogniser
from pipeline.recognisers import Hit, merged, pattern_recognisers

REGIONS = ("US", "GB", "DE", "FR", "ES", "IT", "BR", "IN")


def found(text, *, label="", recognisers=None):
    """(kind, value) of everything in a text."""
    recognisers = recognisers or (*pattern_recognisers(), PhoneRecogniser(REGIONS), Credentials())
    hits = merged((hit for one in recognisers for hit in one.hits(text, label)), text)
    return [(hit.kind, text[hit.start : hit.end]) for hit in hits]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to Anna.Berg+x@mail.firma.co.uk, please", ("email", "Anna.Berg+x@mail.firma.co.uk")),
        ("ops@backup01.corp is full", ("email", "ops@backup01.corp")),
        ("メールはanna@firma.jpです", ("email", "anna@firma.jp")),
        ("anna (at) firma (dot) de", ("email", "anna (at) firma (dot) de")),
        ("card 4539 1488 0343 6467 322", ("card", "4539 1488 0343 6467")),
        ("3714-496353-98431", ("card", "3714-496353-98431")),
        ("2221000000000009", ("card", "2221000000000009")),
        ("auf DE89 3704 0044 0532 0130 00 von mir", ("iban", "DE89 3704 0044 0532 0130 00")),
        ("gb29nwbk60161331926819", ("iban", "gb29nwbk60161331926819")),
        ("PT50 0002 0123 1234 5678 9015 4 ist", ("iban", "PT50 0002 0123 1234 5678 9015 4")),
        ("QA58DOHB00001234567890ABCDEFG", ("iban", "QA58DOHB00001234567890ABCDEFG")),
        ("MU17BOMM0101101030300200000MUR", ("iban", "MU17BOMM0101101030300200000MUR")),
        ("host 84.12.3.4:8080", ("ip", "84.12.3.4")),
        ("the server 9.12.3.4 is down", ("ip", "9.12.3.4")),
        ('{"client_ip":"9.12.3.4"}', ("ip", "9.12.3.4")),
        ("9.12.3.4 - - [12/Mar/2025:01:02:03 +0000] GET /", ("ip", "9.12.3.4")),
        ("9.12.3.4", ("ip", "9.12.3.4")),
        ("inet6 fe80::a1b2:c3ff:fe4d:5e6f/64 scope link", ("ip", "fe80::a1b2:c3ff:fe4d:5e6f")),
        ("[2a02:8109:9ec0::1f]:443", ("ip", "2a02:8109:9ec0::1f")),
        ("::ffff:84.12.3.4", ("ip", "84.12.3.4")),
        ("+44 (0)161 496 7719", ("phone", "+44 (0)161 496 7719")),
        ("0049 30 81234567", ("phone", "0049 30 81234567")),
        ("(415) 367-5309", ("phone", "(415) 367-5309")),
        ("my mobile: 9876543210", ("phone", "9876543210")),
        ("01 42 68 53 17", ("phone", "01 42 68 53 17")),
        ("Vous pouvez me joindre au 0142685317.", ("phone", "0142685317")),
        ("Sie erreichen mich unter 01512345678", ("phone", "01512345678")),
        ("mi móvil: 612.345.678", ("phone", "612.345.678")),
        ("AKIAQ7RT2MLW5XPB4VN6", ("api_key", "AKIAQ7RT2MLW5XPB4VN6")),
        ("Authorization: Bearer Zq8rT2mLw9XpB4vN6cK1sD3f", ("api_key", "Zq8rT2mLw9XpB4vN6cK1sD3f")),
        ('{\\"db_password\\": \\"Zq8rT2m!\\"}', ("password", "Zq8rT2m!")),
        ("Passwort lautet Sommer2024", ("password", "Sommer2024")),
        ("SMTP_PASS=Zq8rT2mLw9", ("password", "Zq8rT2mLw9")),
        ('network={ssid="Attic" psk="Zq8rT2mLw9"}', ("password", "Zq8rT2mLw9")),
        ("<Password>Zq8rT2m!</Password>", ("password", "Zq8rT2m!")),
        ('<password encrypted="false">Zq8rT2m!</password>', ("password", "Zq8rT2m!")),
        ('<add key="DbPassword" value="Zq8rT2m!" />', ("password", "Zq8rT2m!")),
        ("- name: DB_PASSWORD\n  value: Zq8rT2mLw9", ("password", "Zq8rT2mLw9")),
        ("AZURE_STORAGE_KEY=Zq8rT2mLw9+/xB4vN6cK1==", ("password", "Zq8rT2mLw9+/xB4vN6cK1==")),
        ("requirepass Zq8rT2mLw9", ("password", "Zq8rT2mLw9")),
        ("vllm serve m --api-key Zq8rT2mLw9", ("password", "Zq8rT2mLw9")),
        ("docker login -u joe -p Zq8rT2mLw9 r.io", ("password", "Zq8rT2mLw9")),
        ("sshpass -p 'Zq8rT2m!' ssh h", ("password", "Zq8rT2m!")),
        ("mysqldump -P3306 -u joe -pZq8rT2mLw9 shop", ("password", "Zq8rT2mLw9")),
        ("mariadb -p'Zq8rT2m!' shop", ("password", "Zq8rT2m!")),
        ("mongosh -u joe -p Zq8rT2mLw9 h/shop", ("password", "Zq8rT2mLw9")),
        ("redis-cli -h h -a Zq8rT2mLw9 ping", ("password", "Zq8rT2mLw9")),
        ("curl -s -u joe:Zq8rT2m^ https://h.io", ("password", "Zq8rT2m^")),
        ("CREATE USER joe IDENTIFIED BY 'Zq8rT2m!';", ("password", "Zq8rT2m!")),
        ("ALTER ROLE joe WITH PASSWORD 'Zq8rT2m!';", ("password", "Zq8rT2m!")),
        ("machine h.io login joe password Zq8rT2mLw9", ("password", "Zq8rT2mLw9")),
        ("redis://:Zq8rT2mLw9@cache/0", ("url_secret", "Zq8rT2mLw9")),
        ("https://h.io/a?x=1&api_key=Zq8rT2mLw9&y=2", ("url_secret", "Zq8rT2mLw9")),
    ],
)
def test_a_value_is_found_and_nothing_beside_it(text, expected):
    assert found(text) == [expected]


@pytest.mark.parametrize("between", [",", ";", ", ", "|", "<", "/"])
def test_every_address_of_a_list_is_found(between):
    who = ["anna@firma.de", "berta.x@mail.corp.com", "carl@firma.co.uk"]
    hits = found(between.join(who))
    left = between.join(who)
    for _, value in hits:
        left = left.replace(value, "")
    assert {kind for kind, _ in hits} == {"email"} and not any(name in left for name in ("anna", "berta", "carl", "@"))


@pytest.mark.parametrize(
    "text",
    [
        "4539 1488 0343 6468 fails its check digit",
        "9539 1488 0343 6465 is no issuer's",
        "DE88 3704 0044 0532 0130 00",
        "LU10 530I 0DYF 0XK8 K3SJ keine",
        "3.1415926535897932384",
        "version 4.2.0.1, §3.1.4.2, oid 1.3.6.1.4.1",
        "from version 4.2.0.1 to 4.2.1.7, Edge 12.0.3.1 and 2.5.29.17, build 0.84.12.3",
        "127.0.0.1, 0.0.0.0, 255.255.255.0, 224.0.0.1, ::1, fe80::1",
        "x[::2], a::b, std::dead::beef(), 12:30:45",
        "react@18.2.0, @types/node, git@host, a @ b.T",
        "git clone git@git.firma.de:shop/api.git, then ssh -T git@github.com",
        "a model of 355.356.153 parameters",
        "order 4155552671 of 2024-05-12 15:30:45",
        "ISBN 978-3-16-148410-0",
        "password = getpass.getpass(), api_key = os.environ['KEY'], token: str, secret: ${{ x }}",
        "AKIAIOSFODNN7EXAMPLE is in the vendor's pages",
        "?token=YOUR_TOKEN&page=2",
        "Culture=neutral, PublicKeyToken=b77a5c561934e089, publicKey: ssh-ed25519",
        "--max-tokens 4096 --tokenizer gpt2 --token-file /run/t0ken --password $DB_PASS1 --password-stdin a1",
        "docker run -p 8080:80 nginx1, ssh -p 2222 h1, mysql -u root -p shop < dump2024.sql, curl -u $USER1:$PASS1 h",
        "<th>Token</th><td>A1-B2-C3</td>, List<Token>tokens2, boarding pass: AB12CD34, IDENTIFIED BY 'password'",
        "it begins with -----BEGIN RSA PRIVATE KEY----- and goes on with base64",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        "-----BEGIN PUBLIC KEY-----\nMIIBIjANBg\n-----END PUBLIC KEY-----",
    ],
)
def test_what_only_looks_like_a_value_stays(text):
    assert found(text) == []


def test_the_name_that_a_value_stands_under_says_what_it_is():
    assert found("hunter2xy", label="db_password") == [("password", "hunter2xy")]
    assert found("9876543210", label="mobile") == [("phone", "9876543210")]
    assert found("hunter2xy", label="title") == found("9876543210", label="count") == []


def test_a_private_key_is_what_stands_between_its_lines_and_all_that_follows_where_the_end_is_missing():
    body = "\nMIIEow" + "aB3d" * 14 + "\n" + "x9Yz" * 16 + "=\n"
    block = f"-----BEGIN RSA PRIVATE KEY-----{body}-----END RSA PRIVATE KEY-----"
    assert found(f"a {block} b") == [("private_key", body)]
    assert found(block.partition("-----END")[0].rstrip() + "\nplease help me") == [("private_key", body.rstrip())]
    escaped = block.replace("\n", "\\n")
    assert found(escaped) == [("private_key", body.replace("\n", "\\n"))]


def test_keys_that_begin_again_and_again_are_each_found_with_an_end_and_without():
    begin, end, key = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "Zq8rT2mLw9XpB4vN6cK1sD3f"
    ended = f"{begin}\n{key}\n{end}\n" * 3
    cut = f"{begin}\n{key}\n" * 3
    assert [kind for kind, _ in found(ended + cut, recognisers=(Credentials(),))] == ["private_key"] * 6
    first, *_ = found(cut + ended, recognisers=(Credentials(),))
    assert first[1].count(key) == 4, "to the first end"


def test_of_values_over_each_other_the_longest_stands_for_all_that_they_cover():
    text = "0123456789"
    short, long = Hit(0, 4, "email", "0123"), Hit(2, 9, "phone", "2345678")
    assert merged([short, long], text) == merged([long, short], text) == [Hit(0, 9, "phone", "012345678")]
    assert merged([Hit(0, 9, "phone", "x"), short], text) == [Hit(0, 9, "phone", "x")]
    assert merged([Hit(0, 4, "ip", "x"), Hit(0, 4, "card", "y")], text) == [Hit(0, 4, "card", "y")]
    assert merged([Hit(4, 6, "ip", "x"), short], text) == [short, Hit(4, 6, "ip", "x")]


def _everything():
    records = [record.body for record in labelled(per_kind=12)] + list(clean(count=300))
    return sorted({text for record in records for text in texts(record)})


def test_looking_only_where_a_value_may_stand_finds_what_presidio_finds_in_the_whole_text():
    """But for the middle of a longer row of dotted numbers, which is no address."""
    whole = pattern_recognisers(lambda text: [(0, text)])
    compared = 0
    for text in _everything():
        ours = {(hit.start, hit.kind, hit.normal) for one in pattern_recognisers() for hit in one.hits(text, "")}
        for hit in (hit for one in whole for hit in one.hits(text, "")):
            compared += 1
            assert (hit.start, hit.kind, hit.normal) in ours or text[hit.end : hit.end + 2] == ".4", hit.kind
    assert compared > 50


def test_a_cheap_look_first_loses_no_phone_number(monkeypatch):
    recogniser = PhoneRecogniser(REGIONS)
    some = [text for text in _everything() if sum(map(str.isdigit, text)) > 6]
    quick = [list(recogniser.hits(text, "")) for text in some]
    monkeypatch.setattr(phones, "_shape", lambda region: phones.re.compile(r"\d"))
    slow = [list(PhoneRecogniser(REGIONS).hits(text, "")) for text in some]
    assert quick == slow
    assert sum(map(len, quick)) > 10


def test_a_region_that_no_plan_knows_is_named():
    with pytest.raises(ConfigError, match="UK is no region"):
        PhoneRecogniser(("US", "UK"))


def test_what_ends_a_line_says_nothing_of_the_next():
    assert found("Why?\npassword=Zq8rT2mLw9") == [("password", "Zq8rT2mLw9")]
    assert found("see http://host:\nanna@firma.de") == [("email", "anna@firma.de")]
    assert found("which version?\n84.12.3.4") == [("ip", "84.12.3.4")]


def test_a_password_may_begin_like_a_placeholder():
    assert found("password: tuXq8rT2mLw9") == [("password", "tuXq8rT2mLw9")]
    assert found("password: YOUR_PASSWORD, api_key = 'my-api-key-here'") == []
    assert found("password: $ecret123!") == [("password", "$ecret123")]
    assert found('password = "(abc123"') == [("password", "(abc123")]
    assert found("password = ${VAULT1}, $DB_PASS1, %DB_PASS1%, {{ v1.pass }}, <pass1>, (pass1)") == []
