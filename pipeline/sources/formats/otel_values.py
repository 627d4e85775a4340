"""Values of OTLP/JSON as plain ones. Source: the OTLP specification, JSON Protobuf encoding."""

from typing import Any

Attributes = dict[str, Any]


def attributes_of(pairs: Any) -> Attributes:
    """Key → value of a list of attributes."""
    if not isinstance(pairs, list):
        return {}
    return {pair["key"]: value_of(pair.get("value")) for pair in pairs if isinstance(pair, dict) and "key" in pair}


def value_of(value: Any) -> Any:
    """The plain value: 64-bit integers may be text, a list and a map hold further values. None for an empty one."""
    if not isinstance(value, dict) or not value:
        return None
    ((kind, found), *_) = value.items()
    match kind:
        case "intValue":
            return int(found)
        case "doubleValue":
            return float(found)
        case "arrayValue":
            return [value_of(item) for item in found.get("values") or []]
        case "kvlistValue":
            return attributes_of(found.get("values"))
        case _:
            return found
