"""Runs the pods of rendered manifests as containers of this machine, as a kubelet would start them.

Each pod has a loopback address of its own, so the ports are the manifests'. Names of Services and
pods are in /etc/hosts. Volumes are folders: a Secret's belongs to root and to the pod's fsGroup,
with the links that a kubelet makes.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.service.processes import ChildProcess

from .images import AS_ROOT, Images, contained
from .manifests import Object, named


class Pods:
    """Containers of the objects of an overlay. They end with the `with`."""

    def __init__(self, images: Images, objects: tuple[Object, ...], directory: Path) -> None:
        self._images = images
        self._objects = objects
        self._directory = directory
        self._network = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(254) + 1}"
        self._stack = contextlib.ExitStack()
        self.addresses: dict[str, str] = {}  # by pod
        for one in objects:
            if one["kind"] in ("StatefulSet", "Deployment"):
                for number in range(one["spec"]["replicas"]):
                    pod = f"{one['metadata']['name']}-{number}"
                    self.addresses[pod] = f"{self._network}.{len(self.addresses) + 1}"

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hosts(self) -> str:
        lines = []
        for service in (o for o in self._objects if o["kind"] == "Service"):
            name, selector = service["metadata"]["name"], service["spec"]["selector"]
            of = selector.get("statefulset.kubernetes.io/pod-name")
            of = of or f"{selector['app.kubernetes.io/name']}-0"
            names = f"{name}.forebay.svc {name}"
            lines.append(f"{self.addresses[of]} {names}")
        for one in (o for o in self._objects if o["kind"] == "StatefulSet"):
            for number in range(one["spec"]["replicas"]):
                pod = f"{one['metadata']['name']}-{number}"
                lines.append(
                    f"{self.addresses[pod]} {pod}.{one['spec']['serviceName']}.forebay.svc"
                )
        return "\n".join(lines)

    def start(
        self,
        pod: str,
        *,
        image: str = "",
        readable: Mapping[str, Path] = {},
        env: Mapping[str, str] = {},
        command: tuple[str, ...] = (),
    ) -> ChildProcess:
        """Start a pod's container: of the target `image` of the Dockerfile, or of this machine.

        `command` takes the place of its own.
        """
        name = pod.rpartition("-")[0]
        kinds = {o["kind"] for o in self._objects if o["metadata"]["name"] == name}
        (kind,) = kinds & {"StatefulSet", "Deployment"}
        workload = named(self._objects, kind, name)["spec"]
        spec = workload["template"]["spec"]
        (container,) = spec["containers"]
        security = spec["securityContext"]
        variables = {**self._environment(container, pod), **env}
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for claim in workload.get("volumeClaimTemplates", []):
            volumes[claim["metadata"]["name"]] = {"emptyDir": {}}
        writable: dict[str, Path] = {}
        read = dict(readable)
        for mount in container.get("volumeMounts", []):
            folder = self._volume(f"{pod}-{mount['name']}", volumes[mount["name"]], security)
            (read if mount.get("readOnly") else writable)[mount["mountPath"]] = folder
        if image:
            process = self._images.container(
                image,
                variables,
                writable=writable,
                readable=read,
                hosts=self.hosts(),
                command=command,
            )
        else:
            process = contained(
                command or container["args"],
                {"PATH": "/usr/bin:/usr/sbin"} | variables,
                user=f"{security['runAsUser']}:{security['runAsGroup']}",
                writable=writable,
                readable=read,
                hosts=self.hosts(),
            )
        return self.ends(process)

    def ends(self, process: ChildProcess) -> ChildProcess:
        self._stack.callback(process.finish)
        self._stack.callback(process.kill)
        return process

    def _environment(self, container: dict[str, Any], pod: str) -> dict[str, str]:
        fields = {"metadata.name": pod, "metadata.namespace": "forebay"}
        found: dict[str, str] = {}
        for e in container.get("env", []):
            source = e.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = named(self._objects, "Secret", source["secretKeyRef"]["name"])
                value = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            else:
                value = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], e["value"])
            found[e["name"]] = value
        if found.get("FOREBAY_HOST") == "0.0.0.0":  # the pod's own network
            found["FOREBAY_HOST"] = self.addresses[pod]
        return found

    def secret(self, name: str) -> Path:
        """A folder with what a pod of another namespace sees of a Secret, with fsGroup 10001."""
        volume = {"secret": {"secretName": name, "defaultMode": 0o440}}
        return self._volume(name, volume, {"fsGroup": 10001})

    def _volume(self, name: str, volume: dict[str, Any], security: Object) -> Path:
        folder = self._directory / name
        if folder.exists():  # it outlives the container
            return folder
        folder.mkdir()
        group = security.get("fsGroup", 0)
        if "emptyDir" in volume:
            self._as_root("chmod", "0777", folder)
            self._as_root("chgrp", str(group), folder)
            return folder
        kind, key = ("Secret", "secretName") if "secret" in volume else ("ConfigMap", "name")
        source = volume["secret" if kind == "Secret" else "configMap"]
        data = named(self._objects, kind, source[key])["data"]
        into = folder / "..2026_11_26"
        into.mkdir()
        (folder / "..data").symlink_to(into.name)
        for item in source.get("items", [{"key": k, "path": k} for k in data]):
            value = data[item["key"]].encode()
            file = into / item["path"]
            file.write_bytes(base64.b64decode(value) if kind == "Secret" else value)
            (folder / item["path"]).symlink_to(f"..data/{item['path']}")
            file.chmod(source.get("defaultMode", 0o644))
            self._as_root("chown", f"root:{group}", file)
        return folder

    def _as_root(self, *command: str | os.PathLike[str]) -> None:
        subprocess.run([*AS_ROOT, *command], check=True)
