"""Who may be written: what each setting allows and denies, and which settings stop the start."""

import pytest

from serving.errors import TapError
from serving.tap.settings import NAMES, TapSettings

KEY = "k1:" + "A" * 43 + "="


def settings(tmp_path="/nowhere", **given):
    named = {"DIR": str(tmp_path), "CONSENT": "allow_all"} | given
    return TapSettings.from_environment({f"SLIPSTREAM_TAP_{name}": value for name, value in named.items()})


def verdict(headers=(), route="chat", **given):
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    return settings(**given).policy.decide(route, raw)


def test_nothing_set_is_nothing_written():
    assert TapSettings.from_environment({}).policy is None


def test_allow_all_must_be_typed_out():
    assert verdict().consent_source == "allow_all"
    for text in ("allow-all", "ALLOW_ALL", "all", "allow_all; route:chat", "*", "yes"):
        with pytest.raises(TapError, match="expected allow_all, or rules like"):
            settings(CONSENT=text)


@pytest.mark.parametrize(
    "text",
    ["header:", "header:X", "header:X=", "header:=yes", "X=yes", "route:", "route:embeddings", "route:chat,", ";",
     "tenant:", "header:X=1;;route:chat", "subject:anna", "header:X Y=1", "header:X\nY=1"],
)  # fmt: skip
def test_a_consent_setting_that_says_nothing_clear_stops_the_start(text):
    with pytest.raises(TapError, match="SLIPSTREAM_TAP_CONSENT holds"):
        settings(CONSENT=text, TENANT_HEADER="x-tenant")


RULES = "header:X-Consent=training; route:responses; tenant:acme,globex"


@pytest.mark.parametrize(
    ("headers", "route", "source"),
    [
        ([("X-Consent", "training")], "chat", "header:x-consent"),
        ([("X-Consent", " training ")], "chat", "header:x-consent"),
        ([("X-Tenant", "acme")], "chat", "tenant"),
        ([], "responses", "route:responses"),
        ([("X-Consent", "no")], "responses", "route:responses"),
        ([("X-Consent", "training"), ("X-Consent", "training")], "chat", "header:x-consent"),
    ],
)
def test_one_rule_that_holds_is_consent_and_is_on_record(headers, route, source):
    found = verdict(headers, route, CONSENT=RULES, TENANT_HEADER="X-Tenant", WITHOUT_TENANT="write")
    assert (found.reason, found.consent_source) == (None, source)


@pytest.mark.parametrize(
    ("headers", "route"),
    [
        ([], "chat"),
        ([("X-Consent", "Training")], "chat"),
        ([("X-Consent", "training, no")], "chat"),
        ([("X-Consent", "training"), ("X-Consent", "no")], "chat"),
        ([("X-Tenant", "Acme")], "chat"),
        ([("X-Tenant", "")], "chat"),
        ([("X-Consent", "")], "completions"),
    ],
)
def test_a_request_that_no_rule_allows_is_denied(headers, route):
    found = verdict(headers, route, CONSENT=RULES, TENANT_HEADER="X-Tenant")
    assert (found.reason, found.consent_source) == ("denied_no_consent", None)


@pytest.mark.parametrize("consent", ["allow_all", "header:X-Consent=training", "route:chat", "tenant:acme"])
@pytest.mark.parametrize(
    "no",
    [
        ("X-Never", "1"), ("X-Never", ""), ("X-Never", "false"), ("X-Retention", "zero"), ("X-Retention", "ZERO"),
        ("X-Retention", "short, zero"),
    ],
)  # fmt: skip
def test_an_opt_out_wins_over_every_yes(consent, no):
    yes = [("X-Consent", "training"), ("X-Tenant", "acme")]
    given = {"CONSENT": consent, "TENANT_HEADER": "X-Tenant", "OPT_OUT": "X-Never; X-Retention=zero"}
    assert verdict(yes, **given).reason is None
    assert verdict([*yes, no], **given).reason == "denied_opt_out"
    assert verdict([*yes, ("X-Retention", "short")], **given).reason is None


@pytest.mark.parametrize("consent", ["allow_all", "header:X-Consent=training", "route:chat", "tenant:initech"])
@pytest.mark.parametrize("tenant", ["initech", "Initech", " INITECH "])
def test_a_zero_retention_tenant_is_never_written(consent, tenant):
    given = {"CONSENT": consent, "TENANT_HEADER": "X-Tenant", "ZERO_RETENTION": "umbrella, initech"}
    headers = [("X-Consent", "training"), ("X-Tenant", tenant)]
    assert verdict(headers, **given).reason == "denied_zero_retention"
    assert verdict([*headers, ("X-Tenant", "acme")], **given).reason == "denied_zero_retention"


@pytest.mark.parametrize(
    "value", ["münchen".encode(), "MÜNCHEN".encode(),
              "münchen".encode("latin-1"), b"acme,initech", b"initech , acme", b'"initech"']
)  # fmt: skip
def test_a_zero_retention_tenant_is_known_however_its_header_comes(value):
    policy = settings(ZERO_RETENTION="münchen,initech", TENANT_HEADER="x-tenant").policy
    assert policy.decide("chat", [(b"x-tenant", value)]).reason == "denied_zero_retention"


@pytest.mark.parametrize("value", [b"zero", b"ZERO, x", b"x,zero;q=1", b'"zero"', b"zero; until=2030"])
def test_an_opt_out_is_one_in_a_list_in_quotes_and_with_parameters(value):
    policy = settings(OPT_OUT="x-retention=zero").policy
    assert policy.decide("chat", [(b"x-retention", value)]).reason == "denied_opt_out"
    assert policy.decide("chat", [(b"x-retention", value.lower().replace(b"zero", b"zeroes"))]).reason is None


def test_a_subject_is_on_record_as_people_write_it_so_that_it_can_be_erased():
    policy = settings(SUBJECT_HEADER="x-subject").policy
    for raw in ("Müller, à la carte à".encode(), "Müller, à la carte à".encode("latin-1")):
        assert policy.decide("chat", [(b"x-subject", raw)]).subject == "Müller, à la carte à"


def test_a_request_that_might_be_a_zero_retention_tenants_is_not_written():
    given = {"TENANT_HEADER": "X-Tenant", "ZERO_RETENTION": "initech"}
    assert verdict([], **given).reason == "denied_without_tenant"
    with pytest.raises(TapError, match="might be one of theirs"):
        settings(**given, WITHOUT_TENANT="write")


@pytest.mark.parametrize("name", ["X-Tenant", "X-Subject"])
def test_a_trusted_header_that_says_two_things_says_nothing(name):
    given = {"TENANT_HEADER": "X-Tenant", "SUBJECT_HEADER": "X-Subject"}
    both = [("X-Tenant", "acme"), ("X-Subject", "anna")]
    assert verdict([*both, (name, "other")], **given).reason == "denied_ambiguous"
    assert verdict(both * 2, **given).reason is None


def test_tenant_and_subject_come_from_their_headers_alone():
    given = {"TENANT_HEADER": "X-Tenant", "SUBJECT_HEADER": "X-Subject"}
    found = verdict([("X-Tenant", "acme"), ("X-Subject", "anna"), ("X-Slice", "mail")], **given)
    assert (found.tenant, found.subject, found.slice) == ("acme", "anna", None)
    assert verdict([("X-Tenant", "acme"), ("X-Subject", "anna")]).tenant is None


@pytest.mark.parametrize("missing", [[], [("X-Subject", "")], [("X-Subject", "  ")], [("X-User", "anna")]])
def test_a_request_without_its_subject_is_not_written_unless_policy_gives_it_one_of_its_own(missing):
    given = {"SUBJECT_HEADER": "X-Subject"}
    assert verdict(missing, **given).reason == "denied_without_subject"
    own = verdict(missing, **given, WITHOUT_SUBJECT="one_request")
    assert (own.reason, own.subject, own.one_request_subject) == (None, None, True)
    named = verdict([("X-Subject", "anna")], **given, WITHOUT_SUBJECT="one_request")
    assert (named.subject, named.one_request_subject) == ("anna", False)
    assert not verdict(missing).one_request_subject


@pytest.mark.parametrize("missing", [[], [("X-Tenant", "")]])
def test_a_request_without_its_tenant_is_not_written_unless_policy_says_so(missing):
    given = {"TENANT_HEADER": "X-Tenant"}
    assert verdict(missing, **given).reason == "denied_without_tenant"
    written = verdict(missing, **given, WITHOUT_TENANT="write")
    assert (written.reason, written.tenant) == (None, None)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CONSENT", "tenant:acme", "expected SLIPSTREAM_TAP_TENANT_HEADER"),
        ("ZERO_RETENTION", "acme", "expected SLIPSTREAM_TAP_TENANT_HEADER"),
        ("RATE", "acme=1", "expected SLIPSTREAM_TAP_TENANT_HEADER"),
        ("ZERO_RETENTION", "acme,,globex", "none of them empty"),
        ("OPT_OUT", "x-never=", "expected NAME or NAME=VALUE"),
        ("OPT_OUT", "x never", "expected the name of a header"),
        ("SUBJECT_HEADER", "x:subject", "expected the name of a header"),
        ("WITHOUT_SUBJECT", "write", "expected deny or one_request"),
        ("WITHOUT_TENANT", "yes", "expected deny or write"),
        ("RATE", "2", "expected a number from 0 to 1"),
        ("RATE", "10%", "expected a number from 0 to 1"),
        ("RATE", "nan", "expected a number from 0 to 1"),
        ("RATE", "=1", "expected like 0.1; acme=1"),
        ("ACCEPTED_FACTOR", "0", "no weight could stand for"),
        ("ACCEPTED_FACTOR", "-1", "expected a number from 0 to 1"),
        ("TTL_HOURS", "for ever", "expected a number from"),
        ("FILE_MIB", "0", "expected a number from"),
        ("FILE_MINUTES", "20000", "expected a number from"),
        ("MEMORY_MIB", "", None),
        ("KEY", "k1:short", "entry 1 is no key"),
        ("KEY", "A" * 43 + "=", "entry 1 is no key"),
        ("KEY", KEY + " k2:" + "!" * 44, "entry 2 is no key"),
        ("KEY_FILE", "/nowhere/keys", "expected a readable file of keys"),
    ],
)
def test_a_value_that_cannot_be_used_stops_the_start_and_says_what_was_expected(name, value, expected):
    if expected is None:
        assert settings(**{name: value})
        return
    with pytest.raises(TapError, match=expected):
        settings(**{name: value})


def test_a_rule_is_checked_although_the_tap_is_off():
    with pytest.raises(TapError, match="expected a number"):
        settings(CONSENT="", RATE="much")


def test_a_misspelt_setting_stops_the_start():
    with pytest.raises(TapError, match="ZERO_RETENTON is no setting of the tap; did you mean SLIPSTREAM_TAP_ZERO_RETE"):
        settings(ZERO_RETENTON="initech")


def test_consent_without_a_folder_stops_the_start():
    with pytest.raises(TapError, match="expected the folder to write to"):
        settings(DIR="")


def test_a_file_may_not_grow_longer_than_it_may_live():
    with pytest.raises(TapError, match=r"at most the 0\.5 hours"):
        settings(TTL_HOURS="0.5", FILE_MINUTES="31")


def test_the_first_key_of_a_file_seals_and_no_message_quotes_one(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"new:{'B' * 43}=\nold:{'A' * 43}=\n")
    key = settings(KEY_FILE=str(path)).log.key
    assert (key.id, len(key.secret)) == ("new", 32) and "secret" not in repr(key)
    path.write_text("new:c2VjcmV0\n")
    with pytest.raises(TapError) as caught:
        settings(KEY_FILE=str(path))
    assert "c2VjcmV0" not in str(caught.value)
    with pytest.raises(TapError, match="expected one of them"):
        settings(KEY=KEY, KEY_FILE=str(path))
    path.write_text("\n")
    with pytest.raises(TapError, match="holds no key"):
        settings(KEY_FILE=str(path))


def test_every_setting_is_described_where_operators_read():
    import serving.tap

    assert all(f"SLIPSTREAM_TAP_{name} " in serving.tap.__doc__ for name in NAMES)
