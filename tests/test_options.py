"""Each option of a server arrives the same from Python, the command line and the environment."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.service import DispatcherConfig, WorkerConfig
from forebay.service.cli import app
from forebay.service.dispatcher import server
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.errors import InvalidArgument
from forebay.service.options import Declared, ServerOptions, flags, options_of
from forebay.service.worker import WorkerOptions, worker

COMMANDS: dict[str, type[ServerOptions]] = {
    "dispatcher": DispatcherOptions,
    "worker": WorkerOptions,
}
REQUIRED: dict[str, dict[str, Any]] = {"dispatcher": {}, "worker": {"dispatcher": "h:1"}}
CONFIGS = {"dispatcher": DispatcherConfig, "worker": WorkerConfig}
OF_WORDS = {
    "host": "h",
    "dispatcher": "h:1",
    "tags": "a,b",
    "data_transfer_protocol": "TCP",
    "retention_hours": "0.5",
    "workers": "a:1,b:%port%",
    "deployment_mode": "COLOCATED",
    "load_op_library": "/a.so,/b.so",
    "data_root": "/data,gs://b/data",
}

CASES = [
    pytest.param(command, declared, id=f"{command}-{declared.name}")
    for command, options in COMMANDS.items()
    for declared in options_of(options)
]


def text_for(declared: Declared) -> str:
    """A value that is not the default, as one writes it on a command line."""
    most = str(declared.most)
    plain = {bool: "true", int: most, float: most, str: "h:%port%"}
    return OF_WORDS.get(declared.name) or plain[declared.type]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """What the commands would have served with."""
    seen: list[ServerOptions] = []

    async def serve(options: ServerOptions, ready: object) -> bool:
        seen.append(options)
        return True

    class NoWorker:
        def __init__(self, options: ServerOptions, pipelines: object) -> None:
            seen.append(options)
            raise InvalidArgument("seen")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(worker, "Worker", NoWorker)
    return seen


def told(
    served: list[ServerOptions], command: str, *arguments: str, **environment: str
) -> dict[str, Any]:
    served.clear()
    done = CliRunner().invoke(app, [command, *arguments], env=environment)
    assert len(served) == 1, done.output
    return dataclasses.asdict(served[0])


def configured(command: str, **given: Any) -> ServerOptions:
    """From Python."""
    config: Any = CONFIGS[command]
    given = {config.NAMES.get(name, name): value for name, value in given.items()}
    return config(**given).options()


@pytest.mark.parametrize(("command", "declared"), CASES)
def test_it_arrives_the_same(command: str, declared: Declared, served: list[ServerOptions]) -> None:
    text, flag = text_for(declared), f"--{declared.name.replace('_', '-')}"
    required = {k: v for k, v in REQUIRED[command].items() if k != declared.name}
    others = [f"--{name}={value}" for name, value in required.items()]
    argument = flag if declared.type is bool else f"{flag}={text}"
    by_argument = told(served, command, *others, argument)
    by_variable = told(served, command, *others, **{f"FOREBAY_{declared.name.upper()}": text})
    value = by_argument[declared.name]
    assert value != declared.default
    expected = dataclasses.asdict(COMMANDS[command](**required, **{declared.name: value}))
    assert by_argument == by_variable == expected
    from_python = configured(command, **required, **{declared.name: value})
    assert dataclasses.asdict(from_python) == expected
    if command == "dispatcher":  # which is a child process
        assert told(served, command, *flags(from_python)) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_none_is_the_default(command: str, served: list[ServerOptions]) -> None:
    options, required = COMMANDS[command], REQUIRED[command]
    nothing = dict.fromkeys(d.name for d in options_of(options)) | required
    plain = dataclasses.asdict(options(**required))
    assert dataclasses.asdict(configured(command, **nothing)) == plain
    assert told(served, command, *(f"--{k}={v}" for k, v in required.items())) == plain
    for declared in options_of(options):
        if not declared.required and declared.convert is None:
            assert declared.check(declared.default) == declared.default


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_said_of_each(command: str) -> None:
    config: Any = CONFIGS[command]
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "500"}).output
    for declared in options_of(COMMANDS[command]):
        name = config.NAMES.get(declared.name, declared.name)
        assert f"    {name}: {declared.help}" in (config.__doc__ or "")
        assert declared.help in shown


NUMBERS = [
    pytest.param(command, declared, id=f"{command}-{declared.name}")
    for command, options in COMMANDS.items()
    for declared in options_of(options)
    if declared.range
]


@pytest.mark.parametrize(("command", "declared"), NUMBERS)
def test_a_number_that_makes_no_sense_is_answered_with_the_range(
    command: str, declared: Declared, served: list[ServerOptions]
) -> None:
    required = [f"--{name}={value}" for name, value in REQUIRED[command].items()]
    flag = f"--{declared.name.replace('_', '-')}"
    wrongs = ["99999999999999999999", "-2", "-0.5" if declared.type is float else "-3"]
    if declared.least != 0:
        wrongs.append("0")
    for wrong in wrongs:
        shown = CliRunner().invoke(app, [command, *required, f"{flag}={wrong}"])
        assert shown.exit_code == 2 and not served
        told = " ".join(shown.output.replace("│", " ").split())
        assert flag in told
        assert f"is out of range; give {declared.range}" in told
    least, most = declared.range.removeprefix("-1, or ").split(" to ")
    off = ["-1"] if declared.off is not None else []
    for right in (*off, least, most):
        value = declared.type(right)
        assert declared.check(value) == value


@pytest.mark.parametrize(
    ("command", "variable", "wrong"),
    [
        ("dispatcher", "FOREBAY_WORKERS", "a b"),
        ("dispatcher", "FOREBAY_WORKERS", "\udcff"),  # what is not UTF-8
        ("dispatcher", "FOREBAY_DEPLOYMENT_MODE", "LOCAL"),
        ("dispatcher", "FOREBAY_LOAD_OP_LIBRARY", "a.so,,b.so"),
        ("worker", "FOREBAY_DATA_TRANSFER_PROTOCOL", "carrier-pigeon"),
        ("worker", "FOREBAY_TAGS", "a,,b"),
        ("worker", "FOREBAY_TAGS", "\udcff"),
    ],
)
def test_a_wrong_value_is_answered_with_the_flag_and_the_variable(
    command: str, variable: str, wrong: str, served: list[ServerOptions]
) -> None:
    required = [f"--{name}={value}" for name, value in REQUIRED[command].items()]
    shown = CliRunner().invoke(app, [command, *required], env={variable: wrong})
    assert shown.exit_code == 2 and not served
    told = " ".join(shown.output.replace("│", " ").split())
    assert variable in told and variable[8:].lower().replace("_", "-") in told


@pytest.mark.parametrize("mode", ["colocated", "DEPLOYMENT_MODE_COLOCATED", 1])
def test_deployment_modes_may_be_tensorflows(mode: Any) -> None:
    given: list[Any] = [mode, None, "UNSPECIFIED", 0, ""]
    understood = [DispatcherOptions(deployment_mode=m).deployment_mode for m in given]
    assert understood == ["COLOCATED", "", "", "", ""]


def test_values_that_make_no_sense() -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"port": 65536}, "port=65536 is out of range; give 0 to 65535"),
        ({"port": "5050"}, "port='5050' must be of type int"),
        ({"port": True}, "port=True must be of type int"),
        ({"retention_hours": float("nan")}, "retention_hours=nan is out of range"),
        ({"standby": 1}, "standby=1 must be of type bool"),
        ({"worker_addresses": ["a:1", ""]}, "no address at place 1"),
        ({"worker_addresses": "a:1,,b:1"}, "no address at place 1"),
        ({"worker_addresses": ["a:1", "b", "b", " a:1"]}, "has 'a:1' twice"),
        ({"worker_addresses": ["a", "grpc://a:1"]}, "can have: 'grpc://a:1', at place 1"),
        (
            {"worker_addresses": "a:%prot%"},
            "The worker's address is not configured .*'a:%prot%', at place 0",  # TensorFlow's words
        ),
        ({"worker_addresses": ["a:1,b:1"]}, "can have: 'a:1,b:1', at place 0"),
        ({"worker_addresses": "[::1]:65536"}, "can have: '.*:65536', at place 0"),
        ({"worker_addresses": 2}, "list of workers is 2"),
        ({"deployment_mode": "LOCAL"}, "deployment_mode='LOCAL' must be one of.*COLOCATED"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(InvalidArgument, match=message):
            DispatcherConfig(**wrong).options()
    for config, arguments in ((DispatcherConfig, ()), (WorkerConfig, ("h:1",))):
        with pytest.raises(TypeError, match="prot: a server has no such option"):
            config(*arguments, prot=1)
    with pytest.raises(InvalidArgument, match="address is empty"):
        WorkerConfig("").options()
    with pytest.raises(InvalidArgument, match=r"\['a.so', ''\] has a path that is empty"):
        WorkerConfig("h:1", load_op_library=["a.so", ""]).options()
    with pytest.raises(InvalidArgument, match=r"'\\udcff.so'\] are not UTF-8; rename the files"):
        WorkerConfig("h:1", load_op_library=["a.so", "\udcff.so"]).options()


def test_positions_and_zeros_are_the_peers() -> None:
    config = DispatcherConfig(5050, "grpc", "/dir", True, None, 0, 0, 70, 1)
    options = config.options()
    assert (options.port, options.storage) == (5050, "file:///dir")
    assert (options.job_gc_check_interval_ms, options.job_gc_timeout_ms) == (1, 0)
    assert options.worker_timeout_ms == 70
    told = WorkerConfig("h:1", "me:2", 3, "grpc", 0, 0, "grpc", "me:4").options()
    assert (told.dispatcher, told.address, told.port) == ("h:1", "me:2", 3)
    assert (told.heartbeat_interval_ms, told.dispatcher_timeout_ms) == (1, 1)
    assert (told.data_transfer_protocol, told.data_address) == ("grpc", "me:4")


def test_a_configuration_has_its_arguments_as_tensorflows_has() -> None:
    config = DispatcherConfig(5050, worker_timeout_ms=0, storage="redis://:secret@h")
    assert (config.port, config.worker_timeout_ms, config.work_dir) == (5050, 0, None)
    assert config.storage == "redis://:secret@h" and "secret" not in repr(config)
    assert config == DispatcherConfig(5050, worker_timeout_ms=0, storage="redis://:secret@h")
    assert config != DispatcherConfig(5051)
    assert pickle.loads(pickle.dumps(config)) == config == copy.copy(config)
    assert hash(config) == hash(
        DispatcherConfig(storage="redis://:secret@h", worker_timeout_ms=0, port=5050)
    )
    assert DispatcherConfig(host=None) == DispatcherConfig()
    assert "work_dir='/d'" in repr(DispatcherConfig(work_dir="/d"))
    with pytest.raises(AttributeError, match="a configuration does not change"):
        config.port = 5051
    with pytest.raises(AttributeError, match="no option 'prot'"):
        _ = config.prot
