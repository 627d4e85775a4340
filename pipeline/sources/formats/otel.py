"""OpenTelemetry GenAI telemetry as the collector's file exporter writes it: OTLP/JSON, a batch of many a line.

- Attributes of a span or of the event ``gen_ai.client.inference.operation.details`` (semantic conventions 1.37 and
  later): ``gen_ai.input.messages``, ``gen_ai.system_instructions``, ``gen_ai.tool.definitions``.
- Events ``gen_ai.user.message``, ``gen_ai.choice`` and so on (1.28 to 1.36), of a span, or log records with a span's
  id. Log records are put together within a line: a request whose events an exporter's batches part is read as far as
  the line goes, and without its settings, which are on the span. The newer form has neither weakness.

Other spans and log records of a line are other telemetry and no records. A request that both a span and a log record
describe has one id in both.

Source: OpenTelemetry semantic conventions for generative AI; OTLP/JSON encoding of the protocol's specification.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import Rejected
from pipeline.sources.formats import otel_messages
from pipeline.sources.formats.otel_values import Attributes, attributes_of, value_of

_CHATS = ("chat", "text_completion", "generate_content", None)
_DETAILS = "gen_ai.client.inference.operation.details"
_FAILED = 2  # the code of a span's status
_PARAMS = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.stop_sequences": "stop",
    "gen_ai.request.choice.count": "n",
    "gen_ai.request.seed": "seed",
}
_WHOLE = ("top_k", "max_tokens", "n", "seed")  # some instrumentations write them as doubles
_MESSAGES = ("gen_ai.input.messages", "gen_ai.system_instructions")


def fits(body: dict[str, Any]) -> bool:
    """A batch of spans or log records."""
    return isinstance(body.get("resourceSpans"), list) or isinstance(body.get("resourceLogs"), list)


def records(body: dict[str, Any]) -> Iterator[dict[str, Any] | Rejected]:
    """The requests that a batch's spans and log records describe."""
    for resource, span in _items(body, "resourceSpans", "scopeSpans", "spans"):
        yield from _tried(_of_span, resource, span)
    events: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for resource, log in _items(body, "resourceLogs", "scopeLogs", "logRecords"):
        name = _event_name(log)
        if name == _DETAILS:
            yield from _tried(_of_details, resource, log)
        elif name in otel_messages.EVENTS:
            events.setdefault((log.get("traceId"), log.get("spanId")), []).append(log)
    for (trace, span), logs in events.items():
        yield from _tried(_of_events, {}, {"traceId": trace, "spanId": span, "logs": logs})


def _tried(read: Any, resource: Attributes, item: Mapping[str, Any]) -> Iterator[dict[str, Any] | Rejected]:
    try:
        record = read(resource, item)
    except Rejected as reason:
        yield reason
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        yield Rejected("malformed_record")
    else:
        if record is not None:
            yield record


def _items(body: Mapping[str, Any], *path: str) -> Iterator[tuple[Attributes, Mapping[str, Any]]]:
    """Every span or log record of a batch, with its resource's attributes."""
    for of_resource in _objects(body.get(path[0])):
        resource = attributes_of((of_resource.get("resource") or {}).get("attributes"))
        for of_scope in _objects(of_resource.get(path[1])):
            for item in _objects(of_scope.get(path[2])):
                yield resource, item


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _of_span(resource: Attributes, span: Mapping[str, Any]) -> dict[str, Any] | None:
    attributes = attributes_of(span.get("attributes"))
    operation = attributes.get("gen_ai.operation.name")
    events = [
        {"eventName": event.get("name"), "attributes": event.get("attributes")}
        for event in _objects(span.get("events"))
    ]
    events = [event for event in events if event["eventName"] in otel_messages.EVENTS]
    has_content = bool(events) or any(name in attributes for name in _MESSAGES)
    if operation not in _CHATS or (operation is None and not has_content):
        return None
    status = span.get("status")
    if "error.type" in attributes or (
        isinstance(status, dict) and status.get("code") in (_FAILED, "STATUS_CODE_ERROR")
    ):
        raise Rejected("failed_request")
    if not has_content:
        raise Rejected("prompt_not_recorded")
    said = _said(attributes, resource, span, span.get("startTimeUnixNano"))
    if any(name in attributes for name in _MESSAGES):
        return {**said, **otel_messages.of_attributes(attributes)}
    return {**said, **otel_messages.of_events(events), **_tools(attributes)}


def _of_details(resource: Attributes, log: Mapping[str, Any]) -> dict[str, Any] | None:
    attributes = attributes_of(log.get("attributes"))
    body = value_of(log.get("body"))
    attributes |= body if isinstance(body, dict) else {}  # some instrumentations put them there
    if attributes.get("gen_ai.operation.name") not in _CHATS:
        return None
    if "error.type" in attributes:
        raise Rejected("failed_request")
    if not any(name in attributes for name in _MESSAGES):
        raise Rejected("prompt_not_recorded")
    return {**_said(attributes, resource, log, _log_time(log)), **otel_messages.of_attributes(attributes)}


def _of_events(resource: Attributes, span: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a span's log records, in the order in which they were written."""
    logs = span["logs"]
    found = otel_messages.of_events(logs)
    if not found["messages"]:
        raise Rejected("reply_alone")
    return {**_said(attributes_of(logs[0].get("attributes")), resource, span, _log_time(logs[0])), **found}


def _tools(attributes: Attributes) -> dict[str, Any]:
    tools = otel_messages.tools_of(attributes)
    return {} if tools is None else {"tools": tools}


def _said(attributes: Attributes, resource: Attributes, where: Mapping[str, Any], ts: Any) -> dict[str, Any]:
    """What the telemetry says of a request beside its messages. Raises: Rejected for a reply of unknown form."""
    if attributes.get("gen_ai.output.type") not in (None, "text"):
        raise Rejected("unsupported_response_format")  # that there was a schema is known, not which
    trace, span = where.get("traceId"), where.get("spanId")
    subject = next((attributes[name] for name in ("enduser.id", "user.id") if attributes.get(name)), None)
    own_id = f"{trace}:{span}" if trace and span else attributes.get("gen_ai.response.id")
    operation = attributes.get("gen_ai.operation.name")
    return {
        "id": own_id,
        "ts": ts,
        "model": attributes.get("gen_ai.request.model"),
        "route": "completions" if operation == "text_completion" else "chat",
        "tenant": resource.get("tenant.id"),
        "subject": subject,
        "conversation": attributes.get("gen_ai.conversation.id"),
        "params": {
            theirs: _whole(attributes[name]) if theirs in _WHOLE else attributes[name]
            for name, theirs in _PARAMS.items()
            if attributes.get(name) is not None
        },
    }


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _log_time(log: Mapping[str, Any]) -> Any:
    return log.get("timeUnixNano") or log.get("observedTimeUnixNano")


def _event_name(log: Mapping[str, Any]) -> Any:
    return log.get("eventName") or attributes_of(log.get("attributes")).get("event.name")
