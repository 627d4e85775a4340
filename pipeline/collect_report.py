"""What a run of collect took and left out, as one page for people and as JSON: counts by source, reason, kind, stratum.

Neither holds a word that somebody wrote, nor a subject: names of sources, reasons, kinds of data, and how many.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.charts import bars
from pipeline.collected import BY_POLICY
from pipeline.tally import Tally
from pipeline.windows import watermarks

PAGE, JSON = "report.html", "report.json"
TEMPLATE = "collect_report.html.j2"
# What became of a distinct prompt, in the page's words.
_FATES = {
    "kept": "stand for themselves and their near-duplicates",
    "near_duplicate": "count in a row that they are near to",
    "near_gate": "dropped: near a prompt that judges",
    "near_validation": "dropped: near a prompt that selects",
    "few_subjects": "dropped: of a tenant with too few subjects",
    "not_sampled": "over the budget",
}


def as_json(tally: Tally, chosen: Mapping[str, Any], *, window: str) -> dict[str, Any]:
    """The body of report.json."""
    body = tally.as_json()
    latest = {name: one["newest"] for name, one in body["sources"].items()}
    return {
        "window": window,
        "records": tally.records,
        "kept": tally.kept,
        "dropped": dict(sorted(tally.dropped.items())),
        **body,
        "watermarks": watermarks(latest),
        "prompts": chosen,
    }


def page(report: Mapping[str, Any], *, title: str) -> str:
    """The page of a report.json: self-contained HTML, no script, nothing fetched."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["share"] = lambda number, of: f"{number / of:.1%}" if of else "-"
    counts = report["prompts"]["counts"]
    return environment.get_template(TEMPLATE).render(
        title=title,
        report=report,
        policy=BY_POLICY,
        fates=[(name, counts[name], said) for name, said in _FATES.items() if counts.get(name)],
        tokens=bars({name: float(count) for name, count in report["prompts"]["lengths"].items()}),
        strata=sorted(report["prompts"]["strata"], key=lambda one: (-one["kept"], one["stratum"]))[:50],
    )
