"""People and places, by spaCy models that are installed; without one the configuration has to say so."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import ConfigError
from pipeline.recognisers import Hit, Recogniser

_LABELS = {"PERSON": "person", "PER": "person", "GPE": "place", "LOC": "place", "FAC": "place"}


def named_entities(names: Literal["required", "not_redacted"] | Sequence[str]) -> tuple[Recogniser, ...]:
    """The recognisers of names that the configuration asks for.

    Raises: ConfigError where it asks for names and names no model, or one that is not installed.
    """
    if names == "not_redacted":
        return ()
    if names == "required" or not names:
        raise ConfigError(
            'collect.redaction.names = "required", but no model that finds names is given. Install one and name it: '
            "python -m spacy download en_core_web_lg, --set 'collect.redaction.names=[\"en_core_web_lg\"]'. Where "
            "names of people and places may stay in the rows, type it out: --set collect.redaction.names=not_redacted"
        )
    return (NamedEntities(tuple(_loaded(name) for name in names)),)


@dataclass(frozen=True)
class NamedEntities:
    """What any of the models takes for a person or a place."""

    models: tuple[Any, ...]

    def hits(self, text: str, label: str) -> Iterator[Hit]:
        for model in self.models:
            for entity in model(text).ents:
                if kind := _LABELS.get(entity.label_):
                    yield Hit(entity.start_char, entity.end_char, kind, entity.text.casefold())


def _loaded(name: str) -> Any:
    import spacy

    try:
        return spacy.load(name)
    except OSError:
        raise ConfigError(
            f"collect.redaction.names: no spaCy model {name!r} is installed here; python -m spacy download {name}, or "
            "give the folder of one"
        )
