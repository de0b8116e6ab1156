"""Lets a streamed answer outlive its decode instance: another one goes on with it, see continuation.py."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from .attempt import Attempt, Means
from .blame import Again, CallEnd
from .continuation import Continuation, ending
from .membership.instance import Instance
from .relay import Relay
from .retries import Retries

logger = logging.getLogger(__name__)


class Resumer:
    """Goes on with the streamed answers that lost their decode instance."""

    def __init__(self, means: Means, retries: Retries) -> None:
        self._limits, self._counters = means.limits, means.counters
        self._retries = retries

    async def finish(
        self, attempt: Attempt, failed: frozenset[Instance], follow: Callable[[Attempt], None]
    ) -> Relay:
        """Brings an answer to its end whose relay is resumable, by other instances or with an error.

        Args:
            failed: those that are not asked.
            follow: called with each new attempt.

        Returns:
            What relayed the last of it.
        """
        relay, transcript, place = attempt.relay, attempt.transcript, attempt.place
        assert relay is not None and transcript is not None
        tries, free = 0, False
        while True:
            if transcript.finished:
                await relay.finish(ending(transcript))
                return relay
            failed |= {place.choice.decode}
            if tries == self._limits.resumes or not await self._retries.resume(
                place, failed, tries, free=free
            ):
                break
            self._counters.resume_tries += 1
            decode = place.choice.decode
            if transcript.wanted.needs_context and not decode.context:
                break
            goes_on = Continuation(transcript, decode.context, attempt.continuation)
            logger.info("request %s goes on at %s after %d tokens", attempt.unique, decode, goes_on.before)
            attempt = dataclasses.replace(
                attempt,
                body=goes_on.body,
                doubted=(),
                may_leave=_stays,
                may_resend=False,
                continuation=goes_on,
                former=relay,
            )
            follow(attempt)
            outcome = await attempt.run()
            # It has computed nothing; several D's may have died together.
            free = outcome.end is CallEnd.CLOSED
            tries += not free
            if attempt.relay is not None:
                relay = attempt.relay
                if not relay.resumable:
                    self._counters.resumed += relay.complete
                    return relay
            elif outcome.culprit is not None and outcome.verdict.again is not Again.NO:
                failed |= {outcome.culprit}
            else:
                break
        self._counters.not_resumed += 1
        await relay.give_up()
        return relay


def _stays(_: Instance) -> bool:
    return False
