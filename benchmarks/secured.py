"""Row `secured`: what TLS and checksums of payloads cost, beside Forebay without them."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from unittest import mock

import trustme

from .calls import CALLERS, Caller, begin_tasks, lease_splits, splits_per_second
from .cluster import SIDES, BenchmarkCluster
from .results import Better, Result
from .servers import our_dispatcher
from .setting import Setting

BATCHES = "4.8 MB batches, over TCP"
LARGE_BATCHES, CONTROL = 0.5, 0.8  # of the plain rate
CHECKSUMS = 0.98
CASES = {
    BATCHES: ("batches over TCP", LARGE_BATCHES),
    "4.8 MB batches, to a process of the worker's host": ("batches into NumPy", None),
    "scalars, over TCP": ("scalars over TCP", None),
}
WAYS = ("plain", "tls", "checksums")


def secured(setting: Setting) -> list[Result]:
    """Only our side. TLS is mutual; its checks of roles are in the rates."""
    directory = setting.directory("secured")
    environment = _certificates(directory)
    with contextlib.ExitStack() as stack:
        clusters = {}
        for way in WAYS:
            home = directory / way
            home.mkdir()
            cluster = BenchmarkCluster(
                SIDES["ours"],
                setting,
                home,
                environment=environment if way == "tls" else {},
                worker_options=("--payload-checksums",) if way == "checksums" else (),
            )
            clusters[way] = stack.enter_context(contextlib.closing(cluster))
            cluster.grow(workers=1, readers=1)
        for cluster in clusters.values():
            cluster.wait_until_ready()
        found = {
            what: setting.alternate(
                **{way: _rate(cluster, case) for way, cluster in clusters.items()}
            )
            for what, (case, _) in CASES.items()
        }
    results = [
        _result(f"{what}, {way}", "elements/s", rates[way], rates["plain"], required)
        for what, rates in found.items()
        for way, required in (("tls", CASES[what][1]), ("checksums", _of_checksums(what)))
    ]
    return [*results, _leases(setting, directory, environment)]


def _of_checksums(what: str) -> float | None:
    return CHECKSUMS if what == BATCHES else None


def _rate(cluster: BenchmarkCluster, case: str) -> Callable[[], float]:
    return lambda: cluster.measure(case).elements_per_s


def _leases(setting: Setting, directory: pathlib.Path, environment: Mapping[str, str]) -> Result:
    for way in ("calls", "calls tls"):
        (directory / way).mkdir()
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(our_dispatcher(directory / "calls"))
        tls = stack.enter_context(our_dispatcher(directory / "calls tls", environment=environment))

        def rate(address: str, variables: Mapping[str, str]) -> float:
            with mock.patch.dict(os.environ, variables):
                with Caller(address) as caller:
                    arguments = [(task_id, 1) for task_id in begin_tasks(caller, CALLERS)]
                return splits_per_second(address, lease_splits, arguments, setting.seconds)

        found = setting.alternate(
            plain=lambda: rate(plain.address, {}), tls=lambda: rate(tls.address, environment)
        )
    what = f"leases of one split, {CALLERS} callers, tls"
    return _result(what, "splits/s", found["tls"], found["plain"], CONTROL)


def _result(
    what: str, unit: str, ours: list[float], plain: list[float], required: float | None
) -> Result:
    return Result(
        row="secured",
        what=f"{what}; peer: Forebay, plain",
        unit=unit,
        better=Better.MORE,
        ours=ours,
        peer=plain,
        required_ratio=required,
    )


def _certificates(directory: pathlib.Path) -> dict[str, str]:
    """An authority and one certificate, for all processes, as variables of the environment."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1", common_name="forebay")
    paths = {name: directory / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(paths["ca"]))
    issued.cert_chain_pems[0].write_to_path(str(paths["cert"]))
    issued.private_key_pem.write_to_path(str(paths["key"]))
    paths["key"].chmod(0o600)
    return {f"FOREBAY_TLS_{name.upper()}": str(path) for name, path in paths.items()}
