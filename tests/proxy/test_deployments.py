"""examples/kubernetes.yaml and those for Compose: valid, with options that p2pkv takes, and stopped in order.

No cluster and no Docker engine has run them. Here their options are read as the programs read them, and the
script that drains an instance before its pod stops is run against a real proxy. The tests marked `long` hold
the files against the specifications, by packages that they install into an environment of their own.
"""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from environments import Unavailable, environment
from proxy_behaviours import after, answer_json
from proxy_fakes import deployed

from p2pkv.config import Options
from p2pkv.pairing import Address
from p2pkv_proxy import options
from p2pkv_proxy.access import Access
from support import commands
from support.examples import EXAMPLES, option, options_of
from support.waiting import eventually

SECRET = "0123456789abcdef" * 4
POD_IP = "10.1.2.3"
VALIDATORS = ("kubernetes-validate==1.37.0", "compose-spec==0.2.1")
KUBERNETES = "1.31"


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    found = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod_of(name: str) -> dict[str, Any]:
    return manifests()["Deployment", f"p2pkv-{name}"]["spec"]["template"]["spec"]


def environ_of(container: dict[str, Any]) -> dict[str, str]:
    """A container's variables as Kubernetes sets them: from its fields, its secret, and each other."""
    found: dict[str, str] = {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == "p2pkv"
            found[each["name"]] = f"{source['secretKeyRef']['key']}-{SECRET}"
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            found[each["name"]] = POD_IP
        else:
            found[each["name"]] = substituted(each["value"], found)
    return found


def substituted(text: str, environ: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], text)


COMPOSED = {
    "compose.yaml": {"prefill": "P", "decode": "D"},
    "compose_pool.yaml": {"first": "both", "second": "both"},
}
"""Each file for Compose: its instances and their roles."""


def services(file: str = "compose.yaml") -> dict[str, Any]:
    """Those of a file for Compose, with IMAGE and MODEL set."""
    values = {"IMAGE": "registry/vllm-p2pkv:0.32.0", "MODEL": "a-model"}
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: values[m[1]], (EXAMPLES / file).read_text())
    return yaml.safe_load(text)


def instance(command: list[str], environ: dict[str, str]) -> Options:
    """What p2pkv reads in a `vllm serve` command."""
    assert command[:2] == ["vllm", "serve"]
    made = options_of(command, has_gpu=True, environ=environ)
    assert made.link == "nccl" and made.secret and made.discovery == "curve"
    assert made.http_address is not None and str(made.http_address.port) == option(command, "--port")
    return made


@pytest.mark.parametrize(("name", "role"), [("prefill", "P"), ("decode", "D")])
def test_instances_on_kubernetes(name: str, role: str) -> None:
    pod = pod_of(name)
    (container,) = pod["containers"]
    environ = environ_of(container)
    command = [substituted(word, environ) for word in [*container["command"], *container["args"]]]
    made = instance(command, environ)
    assert (made.role, made.address, made.http_address) == (
        role,
        Address(POD_IP, 21001),
        Address(POD_IP, 8000),
    )
    # It pings the service, and drains itself there, under the address that it has registered.
    (http,) = manifests()["Service", "p2pkv-proxy"]["spec"]["ports"]
    (discovery,) = manifests()["Service", "p2pkv-discovery"]["spec"]["ports"]
    assert made.proxies == (Address("p2pkv-discovery", discovery["port"]),)
    assert environ["PROXY"] == f"http://p2pkv-proxy:{http['port']}"
    assert environ["ADDRESS"] == str(made.http_address)
    # Both the script and vLLM have their time before the SIGKILL.
    needed = float(environ["DRAIN_SECONDS"]) + float(option(command, "--shutdown-timeout"))
    assert pod["terminationGracePeriodSeconds"] >= needed + 20
    probed = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [each["path"] for each in probed] == ["/health"] * 3
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": 8000, "kv": 21001}
    (mounted,) = [each for each in container["volumeMounts"] if each["name"] == "drain"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "drain"]
    script = Path(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert str(script.parent) == mounted["mountPath"]
    assert script.name in manifests()["ConfigMap", volume["configMap"]["name"]]["data"]


def test_the_proxy_on_kubernetes() -> None:
    pod = pod_of("proxy")
    (container,) = pod["containers"]
    environ = environ_of(container)
    # What Kubernetes sets beside a service of this name.
    environ |= {"P2PKV_PROXY_PORT": "tcp://10.0.0.9:10001", "P2PKV_PROXY_SERVICE_HOST": "10.0.0.9"}
    environ |= {"P2PKV_DISCOVERY_PORT": "tcp://10.0.0.8:30001"}
    assert container["command"] == ["p2pkv-proxy"]
    read = options.read(options.make_parser(), container["args"], environ)
    assert (
        environ["P2PKV_SECRET"]
        and read.admin_token == environ_of(pod_of("decode")["containers"][0])["ADMIN_TOKEN"]
    )
    assert pod["terminationGracePeriodSeconds"] > read.drain_seconds + 3
    clients, instances = (manifests()["Service", f"p2pkv-{name}"]["spec"] for name in ("proxy", "discovery"))
    assert [port["port"] for port in clients["ports"]] == [read.port]
    assert [port["port"] for port in instances["ports"]] == [read.discovery.port]
    deployment = manifests()["Deployment", "p2pkv-proxy"]["spec"]
    assert clients["selector"] == instances["selector"] == deployment["template"]["metadata"]["labels"]
    # It is ready when it has instances. So these must reach it before, and no old pod may keep their pings.
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert instances["publishNotReadyAddresses"] is True and "publishNotReadyAddresses" not in clients
    assert deployment["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("file", COMPOSED)
def test_compose(tmp_path: Path, file: str) -> None:
    found = services(file)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    mounted = "/run/secrets/p2pkv"
    assert found["secrets"].keys() == {"p2pkv"}
    read = options.read(options.make_parser(), found["services"]["proxy"]["command"], {})
    assert str(read.secret_file) == mounted and found["services"]["proxy"]["secrets"] == ["p2pkv"]
    assert found["services"]["proxy"]["ports"] == [f"127.0.0.1:{read.port}:{read.port}"]
    for name, role in COMPOSED[file].items():
        service = found["services"][name]
        assert service["secrets"] == ["p2pkv"] and service["hostname"] == name
        command = [*service["entrypoint"], *service["command"]]
        made = instance([word.replace(mounted, str(tmp_path / "secret")) for word in command], {})
        assert (made.role, made.address.host) == (role, name)
        assert made.proxies == (Address("proxy", read.discovery.port),)
        assert int(service["stop_grace_period"][:-1]) > int(option(command, "--shutdown-timeout"))


async def drained(url: str, address: str) -> asyncio.subprocess.Process:
    script = manifests()["ConfigMap", "p2pkv-drain"]["data"]["drain.py"]
    environ = {"PROXY": url, "ADDRESS": address, "ADMIN_TOKEN": "t", "DRAIN_SECONDS": "20"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", script),
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_a_pod_that_stops_waits_for_its_requests() -> None:
    async with deployed("concurrent", prefill=1, decode=1, guard=Access("t")) as deployment:
        going_on = asyncio.Event()
        leaving = deployment.d
        leaving.behaviour = after(going_on, answer_json)
        request = await deployment.under_way(leaving)
        staying = await deployment.newcomer("D")
        script = await drained(deployment.url, leaving.http_address)
        await eventually(lambda: deployment.routable("D") == [staying.http_address])
        # A request that comes now goes to the one that stays, and the script still waits.
        assert (await deployment.post()).status == 200
        assert len(leaving.requests) == 1 and script.returncode is None
        going_on.set()
        assert (await request).status == 200
        said, _ = await asyncio.wait_for(script.communicate(), 10)
        assert (script.returncode, said) == (0, b"")


async def test_a_pod_stops_although_the_proxy_does_not_know_it() -> None:
    async with deployed("concurrent", guard=Access("t")) as deployment:
        script = await drained(deployment.url, "10.0.0.9:8000")
        said, _ = await asyncio.wait_for(script.communicate(), 10)
        assert script.returncode == 0 and b"not drained: HTTP Error 404" in said


async def test_a_pod_waits_although_the_proxy_stumbles() -> None:
    """One answer that fails does not end the wait."""
    asked: list[str] = []

    async def stumbling(request: web.Request) -> web.Response:
        asked.append(request.method)
        if len(asked) in (1, 3):
            raise web.HTTPServiceUnavailable
        state = "draining" if len(asked) < 5 else "drained"
        return web.json_response({"instances": [{"address": "10.0.0.9:8000", "state": state}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stumbling)
    async with TestServer(app) as server:
        script = await drained(str(server.make_url("")).rstrip("/"), "10.0.0.9:8000")
        said, _ = await asyncio.wait_for(script.communicate(), 15)
        assert (script.returncode, said, asked) == (0, b"", ["POST", "POST", "GET", "GET", "GET"])


@pytest.fixture(scope="module")
def validators(pytestconfig: pytest.Config) -> str:
    try:
        made = environment(pytestconfig.cache.mkdir("environments"), *VALIDATORS)
    except Unavailable as error:
        pytest.skip(str(error))
    return str(made / "bin" / "python")


def told(python: str, program: str, text: str) -> str:
    """What a validator says of `text`; "" if it is valid."""
    done = commands.run(python, "-c", program, input=text)
    return "" if done.returncode == 0 else done.stderr.splitlines()[-1] or "refused"


BY_KUBERNETES = f"""
import sys, yaml, kubernetes_validate
found = list(yaml.safe_load_all(sys.stdin))
for each in found:
    kubernetes_validate.validate(each, {KUBERNETES!r}, strict=True)
sys.exit(not found)
"""
BY_COMPOSE = """
import sys, compose_spec
made = compose_spec.PyCompose.from_yaml(sys.stdin.read())
made.validate()
sys.exit(sorted(made.service_names()) != ["decode", "prefill", "proxy"])
"""


WRONG = {
    "kubernetes.yaml": {"preStop:": "preStopp:", "replicas: 2": "replicas: two", "selector:": "select:"},
    "compose.yaml": {"stop_grace_period": "stop_grace", "interval: 5s": "interval: often", "- p2pkv": "- x"},
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("file", WRONG)
def test_a_file_is_valid_and_would_not_be_with_a_mistake(validators: str, file: str) -> None:
    text, program = (EXAMPLES / file).read_text(), BY_KUBERNETES
    if file == "compose.yaml":
        # It reads no anchors' merge keys and puts no variables in.
        text, program = yaml.safe_dump(services()), BY_COMPOSE
    assert told(validators, program, text) == ""
    for right, wrong in WRONG[file].items():
        assert right in text and told(validators, program, text.replace(right, wrong)), wrong
