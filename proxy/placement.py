"""Where a prompt is computed and where its answer is decoded, by predicted cost (`--placement auto`).

A request goes one of two ways. `whole`: one instance computes the prompt and decodes the answer. `pair`: one
computes the prompt and pushes its KV to another, which decodes. The cost of a way is the sum of

- the seconds until this request's answer ends: the queue where its prompt is computed, the prompt and the
  hand-over, which count twice if the first token waits for them, and the decode steps, which prompts at the
  same instance interrupt;
- `pause_weight` times the seconds for which its prompt stops answers that are decoded where it is computed,
  and those for which other prompts will stop its own answer;
- the seconds by which one more answer in the batch makes the steps of the others longer.

The cheapest way is taken. The parts of the costs are learned for each instance from what the proxy sees
anyway: when P answered, when the first token came, and how long an answer of so many tokens took. One part
depends only on where the prompt is computed, the other only on where the answer is decoded, so choosing among
n instances takes n steps and not n * n. No IO, no clock: `now` is in seconds.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from p2pkv.control.discovery import Workload

from .membership.instance import Instance, WorkloadReport

Placement = Literal["pair", "auto"]
Way = Literal["pair", "whole"]

MAX_COMPARED = 8
"""If there are more instances, so many are drawn, some perhaps twice, and compared."""
# Scales: features are of the order of 1, so that all weights are learned equally fast.
_TOKENS, _STREAMS, _ANSWER = 256.0, 16.0, 64.0
_FORGET, _RIDGE = 0.98, 0.05
_FIRST_TOKEN = 2.0
"""Cost of a second before the first token; one between later tokens costs 1."""
_SHARE_SECONDS = 5.0
"""The share of an instance's time that prompts take is averaged over this time."""
_RECENT, _SHOWN = 256, 16
_LEAST_STEPS = 4
"""The least steps of an answer that is learned from."""
_REPORT_SECONDS = 6.0
_FRESH_SECONDS = 2.5
"""How old a report may be to count: _FRESH_SECONDS while this proxy has prompts there, as it would have
changed since then, and an engine that hangs must not look idle; else _REPORT_SECONDS."""
_ON_ITS_WAY = 0.05
"""About the seconds from the choice of an instance until its scheduler has the request."""


class LeastSquares:
    """A linear prediction by least squares; each observation counts 2% less than the next one. No weight is
    below zero, as nothing here gets faster by having more to do. What the observations do not decide stays
    near the first `weights`. Several may share that list: one that has not learned yet has the weights of the
    last one that did."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = self._shared = weights
        self._columns = range(len(self.weights))
        self._products = [[_RIDGE * (row == column) for column in self._columns] for row in self._columns]
        """Sums of products of the features with each other, and in `_seen` with the observations."""
        self._first = [_RIDGE * weight for weight in weights]
        self._seen = list(self._first)

    def predict(self, *features: float) -> float:
        return sum(map(float.__mul__, self.weights, features))

    def learn(self, seen: float, *features: float) -> None:
        if self.weights is self._shared:
            self._first = [_RIDGE * weight for weight in self._shared]
            self._seen = list(self._first)
        # One stall of the machine must not decide the predictions of a minute.
        seen = min(seen, 4.0 * self.predict(*features) + 0.1)
        for row, feature in enumerate(features):
            products = self._products[row]
            for column in self._columns:
                products[column] = _FORGET * products[column] + feature * features[column]
            products[row] += (1.0 - _FORGET) * _RIDGE
            self._seen[row] = _FORGET * self._seen[row] + feature * seen + (1.0 - _FORGET) * self._first[row]
        self.weights = self._solved(list(self._columns))
        self._shared[:] = self.weights

    def _solved(self, used: list[int]) -> list[float]:
        """The best weights if only those of these columns are not zero, by Cholesky's elimination."""
        rows = [[*(self._products[row][column] for column in used), self._seen[row]] for row in used]
        for at, pivot in enumerate(rows):
            for row in rows[at + 1 :]:
                factor = row[at] / pivot[at]
                for column in range(at, len(pivot)):
                    row[column] -= factor * pivot[column]
        found: dict[int, float] = {}
        for at in reversed(range(len(used))):
            known = sum(rows[at][later] * found[used[later]] for later in range(at + 1, len(used)))
            found[used[at]] = (rows[at][-1] - known) / rows[at][at]
        least = min(found, key=found.__getitem__)
        if found[least] < 0.0 and used[1:]:
            return self._solved([column for column in used if column != least])
        return [max(0.0, found.get(column, 0.0)) for column in self._columns]


_NOTHING = WorkloadReport(Workload(), float("-inf"))


class EngineCosts:
    """What is placed at one instance, and what its work has cost.

    The report of an instance's scheduler includes prompts of other proxies. Of this proxy's own, those are
    added that were placed after the report, or less than `_ON_ITS_WAY` before it. Answers are only this
    proxy's: a fixed share of all, and known at once. What is not learned yet is taken from `like` instances.
    """

    def __init__(self, like: EngineCosts | None = None) -> None:
        self.prompt: LeastSquares = LeastSquares(like.prompt.weights if like else [0.01, 0.05, 0.02])
        """Seconds of a prompt: for any, more for each 256 tokens, and more for these beside 16 answers."""
        self.step: LeastSquares = LeastSquares(like.step.weights if like else [0.02, 0.01, 0.05])
        """Seconds between two tokens of an answer: for any, more for each 16 answers, and more by the share
        of the instance's time that prompts took."""
        self.hand_over: LeastSquares = LeastSquares(like.hand_over.weights if like else [0.02, 0.005])
        """Seconds from P's answer to D's first event: for any, and more for each 256 tokens."""
        self.answers = self.tokens = 0
        """Answers placed here to be decoded, begun or not; and the tokens of the prompts in the queue."""
        self._queue: deque[QueuedPrompt] = deque()
        """This proxy's prompts that are not computed yet, the oldest first."""
        self.report = self._reported = _NOTHING
        """The last report, and the report that still counts."""
        self._new = 0, 0, 0.0
        """Of the queue, how many are not in the report, their tokens, and when the first was placed."""
        self._since = 0.0
        """When the instance began with the prompt that it computes now."""
        self._computed = 0.0
        """Seconds that all prompts so far took together."""
        self._share, self._shared = 0.0, 0.0
        self._area, self._counted = 0.0, 0.0
        """Answers under way, summed over time; and up to when."""

    def prompt_seconds(self, tokens: float, prompts: float = 1.0) -> float:
        """Seconds to compute so many `prompts`, which have so many tokens together."""
        any_prompt, tokens_alone, beside = self.prompt.weights
        more = tokens_alone + beside * self.answers / _STREAMS
        return any_prompt * prompts + more * tokens / _TOKENS

    def queued_seconds(self, now: float) -> float:
        """Seconds until all prompts that are here now are computed. One that is overdue by a time is taken to
        need the same time again, so that an engine that hangs does not look idle."""
        if self._reports(now):
            return self._waiting(now)[2]
        if not self._queue:
            return 0.0
        first, since = self.prompt_seconds(self._queue[0].tokens), now - self._since
        return self.prompt_seconds(self.tokens, len(self._queue)) - first + abs(first - since)

    def _reports(self, now: float) -> bool:
        """Whether its last report is recent enough to count."""
        return now - self.report.at < (_FRESH_SECONDS if self._queue else _REPORT_SECONDS)

    def _waiting(self, now: float) -> tuple[float, float, float]:
        """How many prompts are here now, their tokens, and the seconds they take: what should be left by now
        of the last report, and of the prompts that are not in it."""
        work, begun, (count, size, first) = self._reported.work, self._since, self._new
        any_prompt, token_alone, beside = self.prompt.weights  # prompt_seconds, written out for speed
        each = (token_alone + beside * self.answers / _STREAMS) / _TOKENS
        prompts = tokens = left = 0.0
        if work.prompts:
            seconds = any_prompt * work.prompts + each * work.tokens
            until = self._reported.at + seconds
            if left := max(0.0, until - now):
                prompts, tokens = work.prompts * left / seconds, work.tokens * left / seconds
            begun = max(begun, until)
        if count:
            seconds, past = any_prompt * count + each * size, now - max(begun, first)
            share = 1.0 if past <= 0.0 else max(0.0, 1.0 - past / seconds) if seconds else 0.0
            prompts, tokens, left = prompts + share * count, tokens + share * size, left + share * seconds
        return prompts, tokens, left

    def follow(self, report: WorkloadReport) -> None:
        """Its scheduler has reported."""
        self.report = self._reported = report
        self._count()

    def _count(self) -> None:
        new = [each for each in self._queue if self._is_new(each)]
        self._new = len(new), sum(each.tokens for each in new), new[0].placed if new else 0.0
        self.tokens = sum(each.tokens for each in self._queue)

    def _is_new(self, prompt: QueuedPrompt) -> bool:
        """Whether it is not in the report."""
        return prompt.placed > self.report.at - _ON_ITS_WAY

    def prefill_share(self, now: float, queued: float | None = None) -> float:
        """The share of its time that prompts take, lately and next. `queued`: seconds of prompts that wait;
        None: only this proxy's, so that the shares of all proxies add up."""
        if queued is None:
            queued = self.prompt_seconds(self.tokens, len(self._queue))
        return min(1.0, self._past_share(now) + queued / _SHARE_SECONDS)

    def _past_share(self, now: float) -> float:
        return self._share * math.exp((self._shared - now) / _SHARE_SECONDS)

    def prompt_placed(self, tokens: int, now: float) -> QueuedPrompt:
        if not self._queue:
            self._since = now
        prompt = QueuedPrompt(tokens, now)
        if self._reports(now):
            count, others, _ = self._waiting(now)
            prompt.among = count + 1.0, others + tokens
        self._queue.append(prompt)
        self._count()
        return prompt

    def prompt_left(self, prompt: QueuedPrompt, now: float) -> None:
        if self._queue[0] is prompt:
            self._since = now
        self._queue.remove(prompt)
        self._count()

    def prompt_computed(self, prompt: QueuedPrompt, now: float, *, learn: bool = True) -> None:
        """The prompt took the time since the one before, as they are computed in order. Where prompts of
        other proxies may lie between, it took the time since it came, with all that were there then."""
        seconds = now - self._since
        if self._is_new(prompt):
            self._reported = _NOTHING
        self.prompt_left(prompt, now)
        if learn:
            count, tokens = prompt.among or (1.0, prompt.tokens)
            size = tokens / count / _TOKENS
            took = (now - prompt.placed) / count if prompt.among else seconds
            self.prompt.learn(took, 1.0, size, size * self.answers / _STREAMS)
        self._share, self._shared = self._past_share(now) + seconds / _SHARE_SECONDS, now
        self._computed += seconds
        self._since = now

    def marks(self, now: float) -> tuple[float, float, float]:
        """For `answer_ended`: now, the seconds of prompts so far, and the answers summed over time so far."""
        return now, self._computed, self._area + self.answers * (now - self._counted)

    def count_answers(self, more: int, now: float) -> None:
        self._area += self.answers * (now - self._counted)
        self._counted = now
        self.answers += more

    def answer_ended(self, steps: int, begun: tuple[float, float, float], now: float) -> None:
        """An answer of so many steps has ended, which began at these `marks`."""
        ended = self.marks(now)
        lasted, prompts, area = (late - early for early, late in zip(begun, ended, strict=True))
        if steps >= _LEAST_STEPS and lasted > 0.0:
            share = min(1.0, prompts / lasted)
            self.step.learn(lasted / steps, 1.0, area / lasted / _STREAMS, share)


@dataclass(eq=False, slots=True)
class QueuedPrompt:
    """A prompt that this proxy has given to an instance, and when."""

    tokens: int
    placed: float
    among: tuple[float, float] | None = None
    """How many prompts were there then, with this one, and their tokens; None without a report."""


class Prediction(NamedTuple):
    """Why a request goes its way: predicted seconds until its first token, the cost of this way, and that of
    the cheapest way of the other kind; None if there is none."""

    way: Way
    first_token: float
    cost: float
    other: float | None = None

    def error(self, seen: float) -> float:
        """By how much the first token missed the prediction, as a share of the seconds that it took."""
        return abs(self.first_token - seen) / max(seen, 1e-3)


OnError = Callable[[Prediction, float], object]


class PlacedRequest:
    """One request from its placement to its end, from which its instances' costs are learned. Without a
    prediction only its answer counts, as nothing is known of its prompt. Each event counts only once."""

    def __init__(
        self,
        costs: PlacementCosts,
        prefill: Instance,
        decode: Instance,
        tokens: int,
        prediction: Prediction | None,
        now: float,
    ) -> None:
        self._costs, self._prediction = costs, prediction
        self._prefill, self._decode = costs.of(prefill), costs.of(decode)
        self._tokens, self._at, self._computed = tokens, now, now
        self._begun: tuple[float, float, float] | None = None
        self._shown = self._left = False
        self._queued = None if prediction is None else self._prefill.prompt_placed(tokens, now)
        self._decode.count_answers(1, now)

    def computed(self, now: float, *, learn: bool = True) -> None:
        """P has computed the prompt; not to `learn`: only the prediction says so, as nothing shows it."""
        if self._queued is not None:
            queued, self._queued, self._computed = self._queued, None, now
            self._prefill.prompt_computed(queued, now, learn=learn)

    def first_token(self, now: float) -> None:
        """The client has its first token; it is P's if D has sent nothing yet."""
        if self._prediction is None or self._shown or self._left:
            return
        self._shown = True
        self.computed(now)  # P's answer may come later
        if self._prefill is not self._decode:
            share = self._costs.from_prefill
            self._costs.from_prefill += 0.05 * ((self._begun is None) - share)
        self._costs.latest.append((self._prediction, now - self._at))
        self._costs.on_error(self._prediction, now - self._at)

    def decodes(self, now: float) -> None:
        """The first event has come from the instance that decodes the answer."""
        if self._begun is not None or self._left:
            return
        self._begun = self._decode.marks(now)
        self.first_token(now)
        if self._prediction is not None and self._prefill is not self._decode:
            self._decode.hand_over.learn(now - self._computed, 1.0, self._tokens / _TOKENS)

    def ended(self, steps: int, now: float) -> None:
        """The answer is complete, with so many tokens after the first one."""
        if self._begun is not None and not self._left:
            self._decode.answer_ended(steps, self._begun, now)
            self._costs.answer_steps += 0.05 * (steps - self._costs.answer_steps)

    def leave(self, now: float) -> None:
        """The request has left these instances."""
        if self._left:
            return
        self._left = True
        if self._queued is not None:
            self._prefill.prompt_left(self._queued, now)
            self._queued = None
        self._decode.count_answers(-1, now)


@dataclass(eq=False)
class PlacementCosts:
    """What all instances have cost, and the cheapest way for a request.

    Attributes:
        pause_weight: cost of a second for which an answer stops; one of waiting for an answer costs 1.
        on_error: called with each prediction and the seconds that it took; `latest` has the last of these.
        answer_steps: tokens of an answer after its first, on average.
        from_prefill: share of the pairs' first tokens that came from P, and so did not wait for D.
    """

    pause_weight: float = 0.1
    on_error: OnError = lambda *_: None
    answer_steps: float = _ANSWER
    from_prefill: float = 0.0
    latest: deque[tuple[Prediction, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    ways: Counter[Way] = field(default_factory=Counter)
    dice: random.Random = field(default_factory=random.Random)
    _engines: WeakKeyDictionary[Instance, EngineCosts] = field(default_factory=WeakKeyDictionary)
    _alike: dict[tuple[str, int], EngineCosts] = field(default_factory=lambda: defaultdict(EngineCosts))
    """Costs shared by instances of one model and size: a new one that seemed slower would get no requests."""

    def of(self, instance: Instance) -> EngineCosts:
        found = self._engines.get(instance)
        if found is None:
            like = self._alike[instance.ping.model, instance.ping.tp_size]
            found = self._engines[instance] = EngineCosts(like)
        if instance.report is not found.report and instance.report is not None:
            found.follow(instance.report)
        return found

    def status(self) -> dict[str, Any]:
        """For /status: how far off the latest predictions were, and why the last ways were chosen."""
        errors = [prediction.error(seen) for prediction, seen in self.latest]
        latest = [*self.latest][-_SHOWN:]
        return {
            "ways": dict(self.ways),
            "median_error": median(errors) if errors else None,
            "latest": [{**each._asdict(), "first_token_seen": seen} for each, seen in latest],
        }

    def cheapest(
        self,
        prefillers: Sequence[Instance],
        decoders: Sequence[Instance],
        decode_alone: int,
        tokens: int,
        cached: Mapping[Instance, int],
        now: float,
        near: Callable[[Instance], Sequence[Instance]] | None = None,
    ) -> tuple[Instance, Instance, Prediction] | None:
        """Where the prompt is computed and where the answer is decoded, the same instance for `whole`; None
        if no two match and none may serve it whole. `decode_alone`: how many prompts a D may compute alone.
        `near` gives the decoders with a link to an instance; None if all have or may have one."""
        looked = self._looked(prefillers, now)
        prompts = {p: self._prompt_part(at, queued, tokens - cached.get(p, 0)) for p, at, queued in looked}
        there = looked if decoders is prefillers else self._looked(decoders, now)
        pairs, whole, answers = [], [], self._answers(there, tokens, now)
        # The second best counts if the best for the prompt is also the best for the answer.
        for prefill, (cost, seconds) in sorted(prompts.items(), key=_COST)[: 1 if near else 2]:
            at_hand = self._answers(self._looked(near(prefill), now), tokens, now) if near else answers
            for more, turn, late, each, *_ in at_hand:
                if each is not prefill and each.matches(prefill):
                    shown = seconds + (1.0 - self.from_prefill) * late
                    pairs.append((cost + more, turn, shown, prefill, each))
                    break
        for more, turn, late, each, engine, queued in answers:
            if each.role == "both" or each.decode_alone < decode_alone:
                prompt = prompts.get(each) or self._prompt_part(engine, queued, tokens - cached.get(each, 0))
                whole.append((prompt[0] + more - self._hand_over_counts * late, turn, prompt[1], each, each))
        best = sorted((min(ways, key=_ORDER) for ways in (pairs, whole) if ways), key=_ORDER)
        if not best:
            return None
        cost, _, first_token, prefill, decode = best[0]
        way: Way = "whole" if prefill is decode else "pair"
        self.ways[way] += 1
        return prefill, decode, Prediction(way, first_token, cost, best[1][0] if best[1:] else None)

    @property
    def _hand_over_counts(self) -> float:
        """Cost of a second of a hand-over: after P's token it is one between tokens."""
        return _FIRST_TOKEN - self.from_prefill * (_FIRST_TOKEN - 1.0)

    def _prompt_part(self, engine: EngineCosts, queued: float, new: int) -> tuple[float, float]:
        """The part of the cost that depends on where the prompt is computed, and seconds until it is."""
        prompt = engine.prompt_seconds(new)
        seconds = queued + prompt
        return _FIRST_TOKEN * seconds + self.pause_weight * engine.answers * prompt, seconds

    def _answers(self, looked: Sequence[_Looked], tokens: int, now: float) -> list[_Answer]:
        """What the answer would cost at each, the cheapest first."""
        found = []
        for each, engine, queued in looked:
            cost, late = self._answer_part(engine, tokens, engine.prefill_share(now, queued))
            found.append((self._hand_over_counts * late + cost, each.turn, late, each, engine, queued))
        return sorted(found, key=_ORDER)

    def _answer_part(self, engine: EngineCosts, tokens: int, share: float) -> tuple[float, float]:
        """The part of the cost that depends on where the answer is decoded, and the seconds of a hand-over to
        there. `share`: of its time that prompts take there."""
        step, longer, stopped = engine.step.weights
        step += longer * (2 * engine.answers + 1) / _STREAMS  # of this answer, and more of the others
        stopped *= share * (1.0 + self.pause_weight)
        late, later = engine.hand_over.weights
        return self.answer_steps * (step + stopped), late + later * tokens / _TOKENS

    def some(self, instances: Sequence[Instance]) -> Sequence[Instance]:
        """The instances that `cheapest` shall compare."""
        if (count := len(instances)) > MAX_COMPARED:
            draw = self.dice.random
            return [instances[at] for at in {int(draw() * count) for _ in range(MAX_COMPARED)}]
        return instances

    def _looked(self, instances: Sequence[Instance], now: float) -> Sequence[_Looked]:
        return [(each, engine := self.of(each), engine.queued_seconds(now)) for each in instances]


_Looked = tuple[Instance, EngineCosts, float]
_Answer = tuple[float, int, float, Instance, EngineCosts, float]
_ORDER, _COST = itemgetter(0, 1), itemgetter(1)
