"""vLLM's MultiConnector for a p2pkv that stands beside a storing connector: which of them loads a prompt.

vLLM's own takes the first connector that has any tokens, and answers "ask again" as long as one of them
does. So a D would wait for P although all of the prompt lies in a store beside it; or it would load the
beginning of a prompt from the store and compute the rest, although P has all of it. Here a store that has the
whole prompt loads it, and D does not wait for P; else the one that has most of it loads it.

It is used by its path, so that vLLM treats it as what it is:
`{"kv_connector": "MultiConnector", "kv_connector_module_path": "p2pkv.connector.multi", ...}`.
"""

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBaseType
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as vllms
from vllm.v1.request import Request

from p2pkv.connector.connector import P2pKvConnector


class MultiConnector(vllms.MultiConnector):
    """A connector beside p2pkv that has the whole prompt loads it, else the one that has most of it."""

    @classmethod
    def _get_connector_classes_and_configs(
        cls, vllm_config: VllmConfig
    ) -> list[tuple[type[KVConnectorBaseType], VllmConfig]]:
        """The connectors and their configurations, with the outer one's policy for failed loads, which vLLM
        reads for all."""
        found: list[tuple[type[KVConnectorBaseType], VllmConfig]]
        found = super()._get_connector_classes_and_configs(vllm_config)
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        for _, config in found:
            config.kv_transfer_config.kv_load_failure_policy = policy
        return found

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond those computed, and whether they come later; (None, False): ask again."""
        connectors = self.sub_connectors
        answers = [each.get_num_new_matched_tokens(request, num_computed_tokens) for each in connectors]
        # So many tokens, and more, leave less than a block to compute, besides the last token.
        enough = request.num_prompt_tokens - self._vllm_config.cache_config.block_size
        whole, undecided = [], []
        for number, (connector, (tokens, _)) in enumerate(zip(connectors, answers, strict=True)):
            pushed = isinstance(connector, P2pKvConnector)
            if tokens is None:
                # On P it is no store's affair whether p2pkv has room for one more prompt of this D.
                undecided.append(pushed and connector.waits_for_load(request))
            elif tokens > 0 and not pushed and num_computed_tokens + tokens >= enough:
                whole.append(number)
        if undecided and not (whole and all(undecided)):
            return None, False
        # Of several that have as much, the first.
        best = whole[0] if whole else max(range(len(answers)), key=lambda number: answers[number][0] or 0)
        tokens, later = answers[best]
        if not tokens or tokens < 0:
            self._requests_to_connector.pop(request.request_id, None)
            return 0, False
        self._requests_to_connector[request.request_id] = best
        return tokens, later
