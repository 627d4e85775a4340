"""The tables [collect] and [retention]: what is read of the traffic, how it is cleaned, and how long it is kept."""

from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import AwareDatetime, BeforeValidator, Discriminator, Field, Tag, field_validator

from pipeline.artifacts import Frozen

# The two forms of one setting; pydantic names the form in the place of an error, where it is no key.
TABLE, WORD = "(table)", "(word)"


class WindowConfig(Frozen):
    """Which time a run of collect is about."""

    kind: Literal["all", "cumulative", "sliding"] = "all"
    """all: every record of the sources, each time. cumulative: those from ``since`` on. sliding: the last ``days``."""
    days: float = Field(14, gt=0)
    """Of a sliding window. It reaches back farther where runs were missed."""
    every_hours: float = Field(24, gt=0, le=24)
    """Windows end at whole multiples of this since midnight UTC: two runs of one night are one."""
    since: AwareDatetime | None = None
    """Where cumulative windows begin; None: with the first record."""
    until: AwareDatetime | None = None
    """The end, in place of the last whole multiple: for a night that was missed, or a window to be made again."""


def _location(value: Any) -> Any:
    return value if isinstance(value, str) and "://" in value else Path(value) if isinstance(value, str) else value


Location = Annotated[Path | str, BeforeValidator(_location)]
"""A path, or the URI of a folder or an object (s3://bucket/prefix), which stays text."""


class SourceConfig(Frozen):
    """One place where served requests are logged."""

    path: Location
    """A folder or a file: plain, .gz or .zst; or its URI on object storage."""
    format: str = "auto"
    """tap, openai, litellm, otel, prompts or text (a prompt a line). auto tells each line's by its shape."""
    name: str | None = Field(None, pattern=r"^[^/\s][^/]*$")
    """What reports call it; its last folder's name where absent."""
    consent: Literal["recorded", "all_users_agreed"] = "recorded"
    """For logs that carry no consent: whoever may say so types out that all users of this source agreed. A record that
    says otherwise of itself is not taken."""
    tenant: str | None = None
    """Of records that name none."""
    timezone: str = "UTC"
    """Of times that name none."""

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        from pipeline.sources.formats import NAMES

        if name not in NAMES:
            raise ValueError(f"no such format; there are {', '.join(NAMES)}")
        return name

    @field_validator("timezone")
    @classmethod
    def _is_a_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            raise ValueError('no such time zone; expected a name like "Europe/Paris"')
        return name


def _entry_kind(value: Any) -> str:
    return "table" if isinstance(value, dict | SourceConfig) else "path"


SourceEntry = Annotated[
    Annotated[Location, Tag("path")] | Annotated[SourceConfig, Tag("table")], Discriminator(_entry_kind)
]


class CustomPattern(Frozen):
    """A pattern of values that only whoever runs this knows to be personal."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    """What the report of a run calls the kind: custom_NAME."""
    pattern: str
    """A regular expression (of the package regex) that matches the value and no more."""
    check: Literal["none", "luhn"] = "none"
    """luhn: only values whose last digit is the check digit of the others."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        import regex

        try:
            compiled = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"not a regular expression: {error}")
        if compiled.match("") is not None:
            raise ValueError("it matches the empty text, so it would be found everywhere")
        return pattern


class RedactionConfig(Frozen):
    """What is found in served text and replaced by made-up values. Patterns and secrets always are."""

    names: Literal["required", "not_redacted"] | tuple[str, ...] = "required"
    """A spaCy model or several, by name or folder, that find people and places. Without one, "not_redacted" must be
    typed out."""
    phone_regions: tuple[str, ...] = ("US", "GB", "DE", "FR", "ES", "IT", "BR", "IN")
    """Countries whose national phone numbers are looked for, the likelier first; international ones always are."""
    custom: tuple[CustomPattern, ...] = ()
    pattern_timeout_s: float = Field(0.25, gt=0, allow_inf_nan=False)
    """Processor time that a custom pattern may take for one text; beyond it, the record is a counted reject."""

    @field_validator("names", mode="before")
    @classmethod
    def _one_model_is_several(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) and names not in ("required", "not_redacted") else names


def _redaction_form(value: Any) -> str:
    """How redaction is set: by the word none, or by a table."""
    return WORD if isinstance(value, str) else TABLE


class CollectConfig(Frozen):
    """Traffic log → PromptSet."""

    sources: tuple[SourceEntry, ...] = ()
    """Folders or files of served requests, here or on object storage; a table says more of one: {path = "...", ...}."""
    piece_bytes: int = Field(32 << 20, gt=0)
    """A task reads so many bytes of the sources."""
    max_line_bytes: int = Field(32 << 20, gt=0)
    """A longer line is a counted reject, and never held in memory."""
    consent: Literal["recorded", "allow_all"] = "recorded"
    """recorded: only records that carry consent. allow_all must be typed out."""
    redaction: Annotated[
        Annotated[RedactionConfig, Tag(TABLE)] | Annotated[Literal["none"], Tag(WORD)], Discriminator(_redaction_form)
    ] = RedactionConfig()
    """none: for traffic that holds no person's data; typed out, by someone who may say so."""
    window: WindowConfig = WindowConfig()
    zero_retention: tuple[str, ...] = ()
    """Tenants of whom nothing is taken, whatever a log says of their consent: the tap's own setting for other logs."""
    served_models: tuple[str, ...] = ()
    """Names that the target itself is served by; a request of another one is an adapter's, and a counted reject. Empty
    takes every name for the target's."""
    tenants: tuple[str, ...] = ()
    """Only records of these tenants; empty takes all. A record that names none is nobody's."""
    except_tenants: tuple[str, ...] = ()
    """No records of these; where there are groups, their tenants are added."""
    validation_share: float = Field(0.1, gt=0, lt=1)
    gate_share: float = Field(0.25, gt=0, lt=1)
    near_similarity: Annotated[float, Field(ge=0.5, le=1)] | Literal["off"] = 0.8
    """Prompts whose texts have this Jaccard similarity or more, of pieces of five characters, are near-duplicates: one
    stands for all, and none trains that is near a held-out one. off: exact duplicates alone."""
    max_prompts: int | None = Field(None, gt=0)
    """Keep at most this many distinct prompts, by keyed hash, of all three sets together."""
    max_prompt_tokens: int | None = Field(None, gt=0)
    """Keep prompts of at most so many tokens in all, counted where the exact ids are on record and else estimated."""
    sample_by: tuple[Literal["tenant", "route", "language", "length", "acceptance"], ...] = (
        "tenant", "route", "language", "length",
    )  # fmt: skip
    """What tells strata apart, the most important first: the last ones don't count where the budgets are too small for
    a row of every stratum."""
    allocation: Literal["proportional", "equal"] = "proportional"
    """How a budget is dealt to strata: the same share of each one's rows, or the same number."""
    min_subjects: int = Field(10, ge=1)
    """Where several tenants share the drafter: a tenant of fewer subjects is left out, and fewer in all that train stop
    the stage."""
    max_subject_share: float = Field(0.2, gt=0, le=1)
    """Where several tenants share the drafter: a subject with a larger share of the training rows stops the stage."""
    max_reject_share: float = Field(0.2, ge=0, le=1)
    """A larger share of rejected records, of those that policy does not leave out, stops the stage."""

    def left_out(self, tenant: object) -> str | None:
        """Why nothing is taken of this tenant's record, of whatever type a log has it; None where it may be."""
        if tenant in self.zero_retention:
            return "zero_retention"
        if (self.tenants and tenant not in self.tenants) or tenant in self.except_tenants:
            return "other_tenant"
        return None


class RetentionConfig(Frozen):
    """How long requests are kept, and what becomes of drafters that learned from one that is erased."""

    ttl_days: float | None = Field(None, gt=0)
    """`slipstream expire` removes rows whose newest request is older, and collect takes no record that is, or that has
    no time; None: nothing expires."""
    unlearn_days: float = Field(30, gt=0)
    """Days that a drafter version which learned from an erased subject may go on serving: its deadline in MLflow."""
    restart: Literal["next_retrain", "at_once"] = "next_retrain"
    """When the lineage begins anew from its last version that learned nothing of the erased: with the next run of the
    loop, or at once, by a run that `slipstream erase` begins."""
    expiry_unlearns: bool = False
    """Whether versions that learned from expired rows get a deadline too. Every row expires: each retraining would then
    begin with the first drafter."""
