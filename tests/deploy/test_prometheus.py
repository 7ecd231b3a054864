"""A real Prometheus scrapes a live cluster: the rules and the dashboard in deploy/ find data."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import prometheus_client
import yaml

from forebay import service
from forebay.service.processes import free_port

from ..cluster import WorkerProcess
from ..slow_trainer import slow_trainer
from ..standbys import wait_until
from ..stock import DispatcherProcess
from .manifests import DEPLOY

RULES = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "forebay.json").read_text())


class Prometheus:
    """A server that scrapes these ports each half second, with RULES."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self._port = free_port()
        every = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        targets = [f"127.0.0.1:{port}" for port in ports]
        jobs = [{"job_name": "forebay", "static_configs": [{"targets": targets}]}]
        config = {"global": every, "rule_files": [str(RULES)], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> Any:
        text = expression.replace("$__rate_interval", "10s")
        return self.get("query", query=text)["result"]

    def health(self) -> list[str]:
        """Of each rule."""
        return [rule["health"] for each in self.get("rules")["groups"] for rule in each["rules"]]

    def alerts(self) -> set[str]:
        """Those that are pending or firing."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"]}

    def answers(self) -> bool:
        try:
            return bool(self.get("query", query="1"))
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()


def test_each_panel_has_data_and_rules_speak_up(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, capture_output=True)
    ports = [free_port(), free_port()]
    registry = prometheus_client.CollectorRegistry()
    service.metrics(registry)
    http, serving = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    with contextlib.ExitStack() as stack:
        stack.callback(serving.join)
        stack.callback(http.server_close)
        stack.callback(http.shutdown)
        dispatcher = stack.enter_context(
            DispatcherProcess(
                tmp_path / "j", http_port=ports[0], load_window_ms=2000, client_timeout_ms=3000
            )
        )
        stack.enter_context(
            WorkerProcess(dispatcher.address, http_port=ports[1], heartbeat_interval_ms=500)
        )
        prometheus = Prometheus(tmp_path, [*ports, http.server_port])
        stack.callback(prometheus.stop)
        dataset_id = service.register_dataset(
            dispatcher.target, lambda n: [n], splits=range(10**12)
        )
        stack.enter_context(slow_trainer(dispatcher.target, dataset_id, 0.01))
        wait_until(prometheus.answers)

        panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
        wanted = {target["expr"]: panel["title"] for panel in panels for target in panel["targets"]}
        for expression, title in wanted.items():
            wait_until(lambda e=expression: prometheus.query(e))
            (one, *_) = prometheus.query(expression)
            labels = re.findall(
                r"{{(\w+)}}", json.dumps([p for p in panels if p["title"] == title])
            )
            assert not labels or set(labels) & one["metric"].keys(), (title, one)
        rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
        wait_until(lambda: prometheus.health() == len(rules) * ["ok"])
        assert not prometheus.alerts() & {"ForebayNoLeader", "ForebayNoWorkers"}

        dispatcher.kill()
        wait_until(lambda: "ForebayNoLeader" in prometheus.alerts())
        dispatcher.restart()
