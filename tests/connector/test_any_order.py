"""Whatever happens in whatever order: nothing hangs, nothing leaks, vLLM is told of each request once.

The made-up engine of support/connector refuses every command that the real one could not carry out.
"""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request

from p2pkv.connector.metadata import StepMetadata
from support.connector.instances import Fact, FakeRank, Instance, inner_id, pair_id, tokens

LENGTHS = (1, 2, 15, 17, 33, 50, 70)
few = settings(deadline=None, max_examples=40)


class Play:
    """One instance and what Hypothesis does to it."""

    def __init__(self, data: st.DataObject, role: str, policy: str = "fail") -> None:
        self.data = data
        self.at = Instance(
            role,
            ranks=data.draw(st.integers(1, 2), "ranks"),
            ahead=data.draw(st.integers(0, 1), "ahead"),
            blocks=data.draw(st.sampled_from([10, 40]), "blocks"),
            budget=data.draw(st.sampled_from([32, 128]), "budget"),
            policy=policy,
        )
        self.requests: list[Request] = []

    def act(self, actions: list[str]) -> None:
        for _ in range(self.data.draw(st.integers(1, 30), "moves")):
            getattr(self, self.data.draw(st.sampled_from(actions)))()

    # Moves

    def step(self) -> None:
        self.at.step()

    def ask(self) -> None:
        unique, child = self.data.draw(st.tuples(st.integers(0, 2), st.sampled_from([None, 0, 1])))
        prompt = tokens(self.data.draw(st.sampled_from(LENGTHS)), self.data.draw(st.integers(0, 1)))
        outer = pair_id(unique) if unique else "alone"
        max_tokens = self.data.draw(st.sampled_from([1, 5, 20]))
        self.requests.append(self.at.ask(inner_id(outer, child=child), prompt, max_tokens=max_tokens))

    def abort(self) -> None:
        live = [each for each in self.requests if not each.is_finished()]
        if live:
            self.at.abort(self.data.draw(st.sampled_from(live)))

    def reset(self) -> None:
        self.at.drain()
        # vLLM preempts all that runs; then it complains if somebody still holds blocks, as P may.
        with contextlib.suppress(RuntimeError):
            self.at.scheduler.reset_prefix_cache(reset_running_requests=True)

    def change(self) -> None:
        connector = self.at.scheduler.connector
        connector.generation.call("update_it", (), {}, lambda: None)
        assert self.at.scheduler.reset_connector_cache()

    def begin(self) -> None:
        self._rank("begin", lambda fact: not fact.offered and not fact.over)

    def load(self) -> None:
        self._rank("load", lambda fact: fact.asked and fact.offered and not fact.over)

    def fail(self) -> None:
        self._rank("fail", lambda fact: not fact.over)

    def free(self) -> None:
        self._rank("free", lambda fact: not fact.over)

    def _rank(self, deed: str, may: Callable[[Fact], bool]) -> None:
        choices = [(rank, key) for rank in self.at.ranks for key, fact in rank.facts.items() if may(fact)]
        if choices:
            rank, key = choices[self.data.draw(st.integers(0, len(choices) - 1), deed)]
            getattr(rank, deed)(key)

    # The end

    def finish(self) -> None:
        for _ in range(400):
            if not self.at.scheduler.requests:
                break
            for rank in self.at.ranks:
                self._help(rank)
            self.at.step()
        self.at.drain()
        self.at.step()
        for rank in self.at.ranks:
            self._help(rank)
        self.at.assert_at_rest()
        assert self.at.ended.keys() == {each.request_id for each in self.requests}

    def _help(self, rank: FakeRank) -> None:
        """What P and the engine do when nothing goes wrong."""
        for key, fact in list(rank.facts.items()):
            if self.at.scheduler.connector.options.role == "P":
                rank.free(key)
            elif not fact.offered and not fact.over:
                rank.begin(key)
            elif fact.asked:
                rank.load(key)


@few
@given(st.data())
@pytest.mark.parametrize(
    ("policy", "fails"),
    [("fail", True), ("recompute", True), ("fail", False)],
    ids=["fail", "recompute", "fine"],
)
def test_d(policy: str, fails: bool, data: st.DataObject) -> None:
    """No request fails but under "fail", and where something has failed or D's weights have changed."""
    play = Play(data, "D", policy)
    faults = ["fail", "change"] if fails else []
    play.act(["step", "step", "ask", "abort", "reset", "begin", "load", *faults])
    play.finish()
    assert (fails and policy == "fail") or "error" not in play.at.ended.values()


@few
@given(st.data())
def test_p(data: st.DataObject) -> None:
    play = Play(data, "P")
    play.act(["step", "step", "ask", "abort", "reset", "change", "free"])
    play.finish()
    assert_contiguous(play.at.metas)
    assert "error" not in play.at.ended.values()


def assert_contiguous(metas: list[StepMetadata]) -> None:
    """Each prompt is said from its beginning to its end without a gap, anew after each revocation."""
    tokens: dict[str, int] = {}
    said: dict[str, int] = {}
    for meta in metas:
        said |= dict.fromkeys([*meta.revoked, *(hold.key for hold in meta.holds)], 0)
        tokens |= {offer.key: offer.tokens for offer in meta.offers}
        for each in meta.prefills:
            key = each.blocks.key
            assert 0 <= each.cached <= each.start <= each.stop <= tokens[key]
            assert said[key] in (0, each.start), "a gap, or tokens that are said twice"
            assert each.stop > said[key]
            assert not each.cached or not said[key], "cached tokens are said at the beginning only"
            said[key] = each.stop
