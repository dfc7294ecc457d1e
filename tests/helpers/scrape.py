"""Reading a process's metrics, and the list of them in docs/observability.md."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

DOC = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
SECTIONS = {
    "router": ("Every process", "Router"),
    "prefill": ("Every process", "Both workers", "Prefill worker"),
    "decode": ("Every process", "Both workers", "Decode worker"),
}


class Documented(NamedTuple):
    """One row. name: as exported, a counter's with its _total."""

    name: str
    type: str
    labels: frozenset[str]


def documented(role: str) -> dict[str, Documented]:
    """By name, what a process of this role exports according to the documentation."""
    text = DOC.read_text()
    found = {}
    for section in SECTIONS[role]:
        part = re.split(r"\n#{2,3} ", text.split(f"\n### {section}\n")[1])[0]
        for name, kind, labels in re.findall(r"^\| `(pdserve_\w+)` \| (\w+) \| ([^|]*)\|", part, re.MULTILINE):
            assert name not in found, f"{name} is documented twice"
            found[name] = Documented(name, kind, frozenset(re.findall(r"`(\w+)`", labels)))
    return found


def families(port: int) -> dict[str, Metric]:
    """By name as documented. Raises what the HTTP request raises."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = text_string_to_metric_families(text)
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}


class Scrape:
    """One process's samples of one moment, by name and labels."""

    def __init__(self, port: int) -> None:
        self.families = families(port)
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """0 for a sample that is not there (yet)."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def by(self, name: str, label: str) -> Mapping[str, float]:
        """The samples of a name by the value of their one label."""
        return {dict(labels)[label]: value for (found, labels), value in self.samples.items() if found == name}

    @property
    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Everything that must never decrease: counters, and histograms' buckets, counts and sums."""
        rising = {s.name for f in self.families.values() if f.type in ("counter", "histogram") for s in f.samples}
        return {key: value for key, value in self.samples.items() if key[0] in rising}
