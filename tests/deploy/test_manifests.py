"""What lies in deploy/ is what Kubernetes, compose and shells take, and fits Forebay's options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from forebay.service.dispatcher.metrics import WANTED
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.options import options_of
from forebay.service.worker.options import WorkerOptions

from .images import DOCKERFILE
from .manifests import DEPLOY, OVERLAYS, ROOT, Object, named, rendered

VERSIONS = ("1.33", "1.37")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVERS = {"forebay-dispatcher": DispatcherOptions, "forebay-worker": WorkerOptions}
AFTER_DRAIN_S = 10  # to say goodbye: docs/operations.md


def check_options(server: str, names: Iterable[str]) -> None:
    """The variables named FOREBAY_… are options of this server."""
    known = {f"FOREBAY_{option.name.upper()}" for option in options_of(SERVERS[server])}
    assert {name for name in names if name.startswith("FOREBAY_")} <= known


def pods(objects: Iterable[Object]) -> Iterable[tuple[Object, Object, Object]]:
    """Each object that makes pods, with the pod's spec and its only container."""
    for one in objects:
        if one["kind"] in ("StatefulSet", "Deployment"):
            spec = one["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            yield one, spec, container


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_kubernetes_takes(overlay: str, secrets: tuple[Object, ...]) -> None:
    objects = (*rendered(overlay), *secrets)
    for version in VERSIONS:
        for one in objects:
            kubernetes_validate.validate(one, version, strict=True)
    assert {o["metadata"].get("namespace") for o in objects} == {None, "forebay"}
    made = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        | {"statefulset.kubernetes.io/pod-name": f"{one['metadata']['name']}-{number}"}
        for one, _, _ in pods(objects)
        for number in range(one["spec"].get("replicas", 1))
    ]
    for o in objects:  # whatever an object names is there
        if o["kind"] == "HorizontalPodAutoscaler":
            target = o["spec"]["scaleTargetRef"]
            assert "replicas" not in made[target["kind"], target["name"]]["spec"]
            assert o["spec"]["metrics"][0]["external"]["metric"]["name"] == WANTED.name
        selector = o.get("spec", {}).get("selector") or o.get("spec", {}).get("podSelector")
        if selector:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= have.items() for have in labels), o["metadata"]
    for one, spec, container in pods(objects):
        own = one["spec"]["template"]["metadata"]["labels"]
        about = [o for o in objects if selects(o, own)]
        is_redis = container["name"] == "redis"  # one pod: a budget would hold up its eviction
        budgets = [o for o in about if o["kind"] == "PodDisruptionBudget"]
        assert len(budgets) == (not is_redis)
        policies = [o["spec"] for o in about if o["kind"] == "NetworkPolicy"]
        let_in = [rule for policy in policies for rule in policy.get("ingress", [])]
        assert {"Ingress"} in [{*policy["policyTypes"]} for policy in policies]  # no others
        assert all(rule["from"] for rule in let_in)
        assert {p["port"] for rule in let_in for p in rule["ports"]} <= {
            p["name"] for p in container["ports"]
        }
        spreads = spec.get("topologySpreadConstraints", [])
        assert bool(spreads) != is_redis
        assert all(s["labelSelector"]["matchLabels"].items() <= own.items() for s in spreads)
        env = {e["name"]: e for e in container.get("env", [])}
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                secret = made["Secret", volume["secret"]["secretName"]]
                items = volume["secret"].get("items", [])
                assert {item["key"] for item in items} <= secret["data"].keys()
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
        for place, e in enumerate(env.values()):
            key = e.get("valueFrom", {}).get("secretKeyRef")
            assert key is None or key["key"] in made["Secret", key["name"]]["data"]
            before = list(env)[:place]
            assert {*re.findall(r"\$\((\w+)\)", e.get("value", ""))} <= {*before}, e
        if one["kind"] == "StatefulSet":
            assert ("Service", one["spec"]["serviceName"]) in made
        # Pod Security "restricted", which the namespace demands, and nothing writable but volumes.
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # A Service would set FOREBAY_… variables, such as FOREBAY_DISPATCHER_PORT.
        assert spec["enableServiceLinks"] is False
        name, _, tag = container["image"].partition(":")
        assert re.match(r"\d+\.\d+\.\d+", tag), "pinned"
        if name in SERVERS:
            assert tag == PROJECT["version"]
            check_options(name, env)
            plain = "FOREBAY_INSECURE" in env
            assert plain == (overlay == "stock-clients")
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                assert container[probe]["httpGet"]["scheme"] == ("HTTP" if plain else "HTTPS")
            ports = {p["name"]: str(p["containerPort"]) for p in container["ports"]}
            assert ports.pop("http") == env["FOREBAY_HTTP_PORT"]["value"]
            assert ports.pop("grpc") == env["FOREBAY_PORT"]["value"]
            assert ports == {"data": env["FOREBAY_DATA_PORT"]["value"]} if ports else True


def selects(one: Object, labels: dict[str, str]) -> bool:
    """Whether a budget or a policy is about pods with these labels."""
    spec = one.get("spec", {})
    selector = spec.get("podSelector", spec.get("selector", {}))
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_has_the_time_to_drain(overlay: str) -> None:
    worker = named(rendered(overlay), "StatefulSet", "forebay-worker")["spec"]["template"]["spec"]
    env = {e["name"]: e.get("value") for e in worker["containers"][0]["env"]}
    drain_s = int(env["FOREBAY_DRAIN_TIMEOUT_MS"]) / 1000
    assert worker["terminationGracePeriodSeconds"] == drain_s + AFTER_DRAIN_S


def test_standbys_hold_up_neither_rollouts_nor_evictions() -> None:
    """Pods of the dispatchers are ready while they are alive; only haproxy asks who leads."""
    dispatcher = named(rendered("redis"), "StatefulSet", "forebay-dispatcher")["spec"]
    (container,) = dispatcher["template"]["spec"]["containers"]
    assert dispatcher["replicas"] == 2
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    budget = named(rendered("redis"), "PodDisruptionBudget", "forebay-dispatcher")["spec"]
    assert budget["maxUnavailable"] == 1
    assert named(rendered("redis"), "Service", "forebay-dispatchers")["spec"][
        "publishNotReadyAddresses"
    ]


@pytest.mark.parametrize("name", SERVERS)
def test_a_unit_is_what_systemd_takes(tmp_path: Path, name: str) -> None:
    units = DEPLOY / "systemd"
    unit = (units / f"{name}.service").read_text()
    file = tmp_path / f"{name}.service"
    file.write_text(unit.replace("/opt/forebay/bin/forebay", sys.executable))
    drop_in = tmp_path / f"{name}.service.d" / "tls.conf"
    drop_in.parent.mkdir()
    drop_in.write_text((units / "tls.conf").read_text())
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, str(tmp_path) in done.stderr) == (0, False), done.stderr
    text = (ROOT / "docs/operations.md").read_text()
    title = name.removeprefix("forebay-")
    shown, *_ = re.findall(rf"^# {title}\.env\n(.*?)(?:\n\n|^```)", text, re.DOTALL | re.MULTILINE)
    assert "FOREBAY_HOST" in shown
    check_options(name, re.findall(r"FOREBAY_\w+", unit + drop_in.read_text() + shown))


def test_compose_is_what_its_schema_takes() -> None:
    file = DEPLOY / "compose" / "compose.yaml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    compose = yaml.safe_load(file.read_text())
    targets = {step["value"].split()[-1] for step in steps("FROM")}
    for name, service in compose["services"].items():
        assert {*service["networks"]} <= compose["networks"].keys()
        assert {*service.get("depends_on", ())} <= compose["services"].keys()
        image, _, version = service["image"].partition(":")
        if image not in SERVERS:
            continue
        assert version == PROJECT["version"]
        assert service["build"]["target"] in targets
        context = file.parent / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).resolve() == DOCKERFILE
        env = service["environment"]
        check_options(image, env)
        assert env["FOREBAY_ADDRESS"].partition(":")[0] == name
        if image == "forebay-worker":
            drain_s = int(env["FOREBAY_DRAIN_TIMEOUT_MS"]) // 1000
            assert service["stop_grace_period"] == f"{drain_s + AFTER_DRAIN_S}s"


def steps(kind: str) -> list[dict[str, Any]]:
    parsed = DockerfileParser(path=str(DOCKERFILE)).structure
    return [step for step in parsed if step["instruction"] == kind]


def test_the_dockerfile_is_sound() -> None:
    """For hadolint, which asks for pinned versions, too; its extras exist."""
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "--format", "json", DOCKERFILE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout) == []
    extras = PROJECT["optional-dependencies"]
    (of_dev,) = re.findall(r"forebay\[(.*?)\]", extras["dev"][0])
    for step in steps("RUN"):
        for listed in re.findall(r"\.whl\)\[(.*?)\]", step["value"]):
            assert {*listed.split(",")} <= {*of_dev.split(",")}, "constraints.txt has these"
    bases = {step["value"].split()[0] for step in steps("FROM")}
    assert [base for base in bases if ":" in base] == ["python:3.11.13-slim-bookworm"]


def test_scripts_are_sound() -> None:
    """For shellcheck."""
    scripts = [DEPLOY / "certificates", DEPLOY / "slurm" / "forebay.sbatch", ROOT / ".ci" / "run"]
    files = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    scripts += [p for p in files if p.read_bytes().startswith(b"#!/usr/bin/env bash")]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert done.stdout == ""
