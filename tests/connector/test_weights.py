"""Weights that change while an instance runs: what they are called, and that vLLM's calls are noticed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from p2pkv.connector.weights import KEEPS_WEIGHTS, SESSION, Generation
from support.connector.instances import Instance

Deed = Callable[[Generation], None]


def generation(model: str = "no/such-model", load_format: str = "auto") -> Generation:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )
    return Generation(config)  # type: ignore[arg-type]


def nothing() -> None: ...


def failing() -> None:
    raise RuntimeError("a worker has failed")


def call(
    weights: Generation, method: object, *args: Any, make: Callable[[], Any] = nothing, **kwargs: Any
) -> None:
    weights.call(method, args, kwargs, make)


def fail(weights: Generation, method: str, **kwargs: Any) -> None:
    with pytest.raises(RuntimeError, match="a worker has failed"):
        call(weights, method, make=failing, **kwargs)


def session(weights: Generation, chunks: int = 2) -> None:
    call(weights, "start_weight_update")
    for _ in range(chunks):
        call(weights, "update_weights", {})
    call(weights, "finish_weight_update")


def reload(weights: Generation) -> None:
    call(weights, "reload_weights", iter(()))


UPDATES = [session, reload, partial(call, method="receive_from_trainer"), partial(call, method=nothing)]


@pytest.mark.parametrize(
    ("on_p", "on_d"),
    [*zip(UPDATES, UPDATES, strict=True), (partial(session, chunks=1), partial(session, chunks=7))],
)
def test_equal_updates_give_equal_names_and_one_alone_another(on_p: Deed, on_d: Deed) -> None:
    """The number of their parts does not count."""
    p, d = generation(), generation()
    assert p.name == d.name == ""
    names = {""}
    for _ in range(3):
        on_p(p)
        assert p.name not in names
        names.add(p.name)
        on_d(d)
        assert p.name == d.name


def test_while_an_update_is_under_way_the_name_is_nobody_elses() -> None:
    p, d = generation(), generation()
    for method in ("start_weight_update", "update_weights"):
        call(p, method)
        call(d, method)
        assert p.name and d.name and p.name != d.name
    before = p.changes
    call(p, "update_weights")
    assert p.changes == before + 1, "what was computed between two parts is not valid after the second"
    call(p, "finish_weight_update")
    call(d, "finish_weight_update")
    assert p.name == d.name


@pytest.mark.parametrize("update", [session, reload])
@pytest.mark.parametrize("broken", ["reload_weights", "update_weights"])
def test_after_an_update_that_failed_only_a_whole_one_helps(update: Deed, broken: str) -> None:
    p, d = generation(), generation()
    if broken == "update_weights":
        call(p, "start_weight_update")
    fail(p, broken)
    p.version("said too early")
    assert p.name.startswith("unfinished")
    p.version("both")
    d.version("both")
    update(p)
    update(d)
    assert p.name == d.name


@pytest.mark.parametrize("method", sorted(SESSION))
def test_what_vllm_refuses_changes_nothing(method: str) -> None:
    """As without --weight-transfer-config, or out of turn."""
    weights = generation()
    fail(weights, method)
    assert (weights.name, weights.changes) == ("", 0)


def test_a_version_takes_the_place_of_the_count_and_later_changes_count_from_it() -> None:
    p, d = generation(), generation()
    session(p)
    session(p)
    for weights in (p, d):
        weights.version("step-7")
    assert p.name == d.name == "version step-7"
    session(p)
    assert p.name == "version step-7+1"
    p.version("step-7")
    assert p.name == "version step-7+1", "a name that is repeated says nothing new"
    p.version("step-8")
    assert p.name == "version step-8"


def test_a_long_version_still_tells_two_apart() -> None:
    p, d = generation(), generation()
    p.version("x" * 1000 + "1")
    d.version("x" * 1000 + "2")
    assert p.name != d.name
    assert len(p.name) < 200


def folder(path: Path, content: str) -> str:
    path.mkdir()
    (path / "model.safetensors").write_text(content)
    return str(path)


def test_files_name_the_weights_that_are_read_from_them_wherever_they_lie(tmp_path: Path) -> None:
    here, there, other = (folder(tmp_path / name, name[-1]) for name in ("a1", "b1", "c2"))
    p, d = generation(here), generation(there)
    call(p, "reload_weights")
    assert p.name.startswith("files ") and p.name != d.name
    call(d, "reload_weights", None, there)
    call(d, "reload_weights", weights_path=there)
    assert p.name == d.name, "however often"
    call(p, "reload_weights", weights_path=other)
    assert p.name != d.name
    call(d, "update_config", {"model_config": {"model": other}})
    call(d, "reload_weights")
    assert p.name == d.name
    call(p, "reload_weights")
    assert p.name == d.name, "vLLM goes on with the path that it was given last"


def test_files_that_are_written_meanwhile_name_nothing(tmp_path: Path) -> None:
    here = folder(tmp_path / "a", "1")
    weights = generation(here)
    call(weights, "reload_weights", make=lambda: (Path(here) / "model.safetensors").write_text("22"))
    assert weights.name == "start+1"


def test_random_weights_are_not_named_by_files(tmp_path: Path) -> None:
    weights = generation(folder(tmp_path / "a", "1"), "dummy")
    call(weights, "reload_weights")
    assert weights.name == "start+1"
    call(weights, "update_config", {"load_config": {"load_format": "auto"}})
    call(weights, "reload_weights")
    assert weights.name.startswith("files ")


def test_a_method_that_p2pkv_does_not_know_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    weights = generation()
    call(weights, "receive_from_trainer")
    fail(weights, "receive_from_trainer")
    assert weights.name == "start+2", "one that failed may have changed a part"
    assert caplog.messages[0].startswith("receive_from_trainer was called in vLLM's workers")
    caplog.clear()
    for method in KEEPS_WEIGHTS:
        call(weights, method, *([{}] if method == "update_config" else []))
    assert (weights.name, caplog.messages) == ("start+2", [])


def test_discarded_weights_are_nobodys_until_they_are_loaded_again(tmp_path: Path) -> None:
    weights = generation(folder(tmp_path / "a", "1"))
    weights.sleeps(1)
    weights.wakes(None)
    assert weights.name == "", "level 1 brings them back"
    weights.sleeps(2)
    weights.wakes(["kv_cache"])
    assert weights.name == ""
    weights.wakes(["weights"])
    assert weights.name.startswith("unfinished")
    call(weights, "reload_weights")
    assert weights.name.startswith("files ")


# That vLLM's calls are noticed.


class Executor:
    """In place of vLLM's: the workers do what they are told, unless it is "break"."""

    is_sleeping = False

    def __init__(self) -> None:
        self.calls: list[object] = []

    def get_kv_connector_handshake_metadata(self) -> None:
        """Which vLLM 0.33 asks for after a sleep."""

    def collective_rpc(
        self, method: object, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        self.calls.append((method, timeout, args, kwargs))
        if kwargs == {"broken": True}:
            failing()
        return ["done"]

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: Any) -> None:
        self.calls.append(("wake_up", tags))


def core_of(instance: Instance) -> Any:
    """An engine core with vLLM's methods, this scheduler, and no workers."""
    core = object.__new__(EngineCore)
    core.scheduler, core.model_executor = instance.scheduler, Executor()  # type: ignore[assignment]
    core.mm_receiver_cache = None
    return core


@pytest.fixture(params=["P", "D"])
def instance(request: pytest.FixtureRequest) -> Instance:
    return Instance(request.param)


def test_every_way_to_change_weights_is_noticed_and_vllm_is_called_as_before(instance: Instance) -> None:
    core = core_of(instance)
    connector: Any = instance.scheduler.connector
    resets: list[str] = []
    reset, connector.reset_cache = (
        connector.reset_cache,
        lambda: (resets.append(connector.generation.name), reset())[1],
    )
    assert core.collective_rpc("start_weight_update") == ["done"]
    assert core.collective_rpc("update_weights", 3.0, (), {"update_info": {}}) == ["done"]
    assert core.collective_rpc("finish_weight_update") == ["done"]
    core.set_weight_version("v1")
    assert core.get_weight_version() == "v1"
    core.collective_rpc("check_health")
    core.collective_rpc("mine", args=(1,))
    with pytest.raises(RuntimeError, match="a worker has failed"):
        core.collective_rpc("reload_weights", kwargs={"broken": True})
    unfinished = connector.generation.name
    assert resets == [resets[0], resets[0], "start+1", "version v1", "version v1+1", unfinished]
    assert core.model_executor.calls[1] == ("update_weights", 3.0, (), {"update_info": {}})
    core.set_weight_version("v1")
    assert len(resets) == 6, "nothing new"


def test_a_sleep_that_discards_weights_is_noticed_at_the_waking(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(instance)
    monkeypatch.setattr(core, "pause_scheduler", lambda **_: None)
    core.sleep(2)
    core.wake_up()
    assert core.model_executor.calls == [("sleep", 2), ("wake_up", None)]
    connector: Any = instance.scheduler.connector
    assert connector.generation.name.startswith("unfinished")


def test_connectors_beside_p2pkv_empty_their_caches_too(
    instance: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    ours: Any = instance.scheduler.connector
    reset: list[str] = []
    both = SimpleNamespace(
        _connectors=[SimpleNamespace(), ours],
        reset_cache=lambda: (reset.append(ours.generation.name), ours.reset_cache())[1],
    )
    instance.scheduler.connector = both  # type: ignore[assignment]
    core_of(instance).collective_rpc("mine")
    assert reset == ["start+1"]
    caplog.clear()
    both.reset_cache = lambda: False
    core_of(instance).collective_rpc("mine")
    assert "a connector beside p2pkv has not emptied its cache" in caplog.messages[-1]


@pytest.mark.parametrize("role", ["P", "D"])
def test_it_can_be_switched_off(role: str) -> None:
    instance = Instance(role, watch_weights=False)
    assert core_of(instance).collective_rpc("mine") == ["done"]
    connector: Any = instance.scheduler.connector
    assert (connector.generation.name, connector.generation.changes) == ("", 0)


def test_an_engine_core_without_p2pkv_is_left_alone() -> None:
    core = object.__new__(EngineCore)
    core.model_executor = Executor()  # type: ignore[assignment]
    assert core.collective_rpc("mine") == ["done"], "vLLM asks its workers before there is a scheduler"
    core.scheduler = SimpleNamespace(get_kv_connector=lambda: None)  # type: ignore[assignment]
    assert core.collective_rpc("mine") == ["done"]
