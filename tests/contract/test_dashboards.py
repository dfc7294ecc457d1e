"""The dashboard, the scrape configuration and the alerts use what is exported, and are what their programs take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.helpers.scrape import SECTIONS, Documented, documented

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/pdserve.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
ROWS = ["Traffic", "Latency", "Queues", "Pages", "Transfers", "Failures"]
OF_PROMETHEUS = {"instance", "job", "le"}
EXPORTED: dict[str, Documented] = {name: row for role in SECTIONS for name, row in documented(role).items()}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL), of the dashboard and the alerts."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']!r}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["definition"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def metric_of(name: str) -> Documented | None:
    """A sample's metric: of histograms there are _bucket, _sum and _count, and nothing by the plain name."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if base != name and base in EXPORTED:
        return EXPORTED[base] if EXPORTED[base].type == "histogram" else None
    found = EXPORTED.get(name)
    return found if found is not None and found.type != "histogram" else None


def wrong_in(expression: str) -> list[str]:
    wrong = []
    for name, selector in re.findall(r"(pdserve_\w+)(?:\{([^}]*)\})?", expression):
        if (metric := metric_of(name)) is None:
            wrong.append(f"{name} is not exported")
            continue
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - OF_PROMETHEUS
        wrong += [f"{name} has no label {label}" for label in labels - metric.labels]
        if metric.type == "counter" and not re.search(rf"rate\({name}\b", expression):
            wrong.append(f"{name} is a counter and used without rate()")
    known = {label for name in re.findall(r"pdserve_\w+", expression) if (found := metric_of(name)) for label in found.labels}
    for grouping in re.findall(r"\bby \(([^)]*)\)", expression):
        wrong += [f"by ({label}) of nothing" for label in re.split(r",\s*", grouping) if label not in known | OF_PROMETHEUS]
    if expression.count("(") != expression.count(")") or expression.count("{") != expression.count("}"):
        wrong.append("brackets do not match")
    return wrong


def test_expressions_use_exported_names_and_their_labels() -> None:
    wrong = {where: found for where, text in expressions() if (found := wrong_in(text))}
    assert wrong == {}


@pytest.mark.parametrize(
    "expression",
    [
        *("pdserve_gone", "pdserve_ttft_seconds", "pdserve_pages_bucket", 'pdserve_pages{role="x"}', "pdserve_requests_total"),
        *("sum by (kind) (pdserve_ready)", "sum(pdserve_pages"),
    ],
)
def test_a_wrong_expression_would_be_found(expression: str) -> None:
    assert wrong_in(expression)


def test_every_metric_but_a_few_is_on_the_dashboard() -> None:
    shown = {metric.name for _, text in expressions() for name in re.findall(r"pdserve_\w+", text) if (metric := metric_of(name))}
    left_out = {"pdserve_draining", "pdserve_sessions", "pdserve_prefill_compute_seconds"}
    assert {name for name in EXPORTED if not name.startswith("pdserve_process_")} - shown == left_out


def test_the_dashboard_is_laid_out_in_its_rows() -> None:
    everything = DASHBOARD["panels"]
    assert [panel["title"] for panel in everything if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_alerts_say_how_bad_and_what() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert re.fullmatch(r"\d+[sm]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"} and rule["annotations"]["summary"]


def test_the_scrape_configuration_has_a_job_per_role_and_loads_the_alerts() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == [f"pdserve-{role}" for role in SECTIONS]
    assert all(
        target.startswith("127.0.0.1:")
        for job in config["scrape_configs"]
        for c in job["static_configs"]
        for target in c["targets"]
    )
    assert config["rule_files"] == ["alerts.yml"]
