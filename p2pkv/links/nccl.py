"""NCCL links: one communicator of two ranks for each link, slots in device memory, nothing that waits.

P names the communicator in its invitation; each side joins it on a helper thread, and a first small
message makes NCCL connect the two, so that a request finds a warm link. A communicator that does not
come up, or whose abort does not return, is abandoned with its thread; the pair then builds another.
"""

import logging
import os
from typing import Annotated

import torch
from msgspec import Meta

from p2pkv.device import cuda_index
from p2pkv.links import nccl_bindings
from p2pkv.links.base import Acceptance, Guard, Invitation, LinkError, LinkFactory, LinkSettings, Nonce
from p2pkv.links.gpu import CudaDevice, DevicePool, pause_of
from p2pkv.links.nccl_bindings import UNIQUE_ID_BYTES, Nccl, NcclError, NcclMissing, version_name
from p2pkv.links.nccl_communicator import FIRST_MESSAGE_BYTES, BusyEnds, NcclContext
from p2pkv.links.nccl_ends import NcclEnd, NcclInbound, NcclOutbound
from p2pkv.links.nccl_memory import division
from p2pkv.links.staging import StagingBudget, aligned

logger = logging.getLogger(__name__)

INIT_SECONDS = 120.0
"""How long NCCL may take to bring a communicator up, whatever the lease: the first one loads modules."""

CLOSE_SECONDS = 2.0
POLL_SECONDS = 0.00002
"""Between two polls, as no call reports that a message has arrived: adds to the time of each."""

BUSY_SHARE = 0.25
"""Part of a device's multiprocessors (SMs) that links may hold: NCCL's kernels spin while they wait for the
peer, one on each channel of each link that has something under way."""

UniqueId = Annotated[bytes, Meta(min_length=UNIQUE_ID_BYTES, max_length=UNIQUE_ID_BYTES)]
Version = Annotated[int, Meta(ge=1, lt=1 << 31)]


class NcclInvitation(Invitation, frozen=True, tag="nccl", rename={"nonce": "tag"}):
    """P's invitation: P's NCCL, and the communicator's name."""

    nonce: Nonce  # again, since `rename` is for the class's own fields
    nccl: Version
    unique_id: UniqueId


class NcclAcceptance(Acceptance, frozen=True, tag="nccl"):
    """D's answer: D's NCCL."""

    nccl: Version


def check_versions(mine: int, theirs: int) -> None:
    """Raises LinkError unless both ends load the very same NCCL; others may hang instead of failing."""
    if mine != theirs:
        raise LinkError(
            f"this rank has NCCL {version_name(mine)} and its peer NCCL {version_name(theirs)}: both must be "
            "the same; install the same nvidia-nccl package on both sides (see `p2pkv doctor`)"
        )


class NcclLinks(LinkFactory):
    """Makes NCCL links for one rank. One thread owns all of them. `kind` names NCCL's exact version, and
    by what it divides messages, so that peers with others are refused at the handshake."""

    blobs = NcclInvitation, NcclAcceptance
    too_many_stuck = "calls to NCCL never returned in this process, for peers that died; restart it"

    def __init__(
        self,
        nccl: Nccl,
        device: CudaDevice,
        staging_bytes: int,
        init_seconds: float = INIT_SECONDS,
        in_flight: int = 1,
        group_bytes: int = 0,
    ) -> None:
        """`in_flight`, `group_bytes`: see NcclContext. Raises ValueError, MemoryError for want of staging."""
        super().__init__()
        self.build_seconds = init_seconds
        self.poll_seconds = POLL_SECONDS
        owner = Guard(f"NCCL on {device.name}")
        busy = BusyEnds(max(1, int(device.processors * BUSY_SHARE) // nccl.channels))
        self.staging = StagingBudget(staging_bytes)
        # All new communicators send what is beside the slots first, and it is never read.
        pool = DevicePool(device.memory, staging_bytes, FIRST_MESSAGE_BYTES)
        self.shared = NcclContext(
            nccl, device, pool, self.staging, init_seconds, owner, busy, in_flight, group_bytes
        )
        self._version = nccl.version()
        self.kind = f"nccl {version_name(self._version)} {division(nccl.channels)}".rstrip()
        logger.info(
            f"{nccl.describe()} on {device.name}: {busy.most} links may be busy at once, with "
            f"{nccl.channels} channels each"
        )

    def carry_both_ways(self) -> None:
        super().carry_both_ways()
        self.shared.carry_both_ways()
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            logger.warning(
                "CUDA_LAUNCH_BLOCKING is set, so with kv_both two instances that send to each other hang "
                "until a lease is over. Leave the variable unset, or use kv_producer and kv_consumer"
            )

    def pause(self) -> float:
        shared = self.shared
        ends = shared.busy if shared.busy is shared.busy_sends else (*shared.busy, *shared.busy_sends)
        return pause_of((end.pause() for end in ends), self.poll_seconds)

    @property
    def stuck(self) -> int:
        return self.shared.openings.stuck + self.shared.aborts.stuck

    def _invitation(self, nonce: bytes) -> NcclInvitation:
        try:
            name = self.shared.nccl.unique_id()
        except NcclError as error:
            raise LinkError(str(error)) from None
        return NcclInvitation(version=1, nonce=nonce, nccl=self._version, unique_id=name)

    def _accept(self, invited: NcclInvitation, window: int) -> tuple[NcclInbound, NcclAcceptance]:
        check_versions(self._version, invited.nccl)
        inbound = NcclInbound(self.shared, invited.unique_id, self.announced, aligned(window))
        return inbound, NcclAcceptance(version=1, answers=invited.nonce, nccl=self._version)

    def _complete(self, invited: NcclInvitation, accepted: NcclAcceptance) -> NcclOutbound:
        check_versions(self._version, accepted.nccl)
        return NcclOutbound(self.shared, invited.unique_id, self.announced)

    def close(self) -> None:
        """Abort every link of this rank, and wait a moment for the aborts. Idempotent."""
        if self._closed:
            return
        super().close()
        self.shared.aborts.join(CLOSE_SECONDS)
        if busy := self.shared.aborts.busy:
            logger.warning("%d of NCCL's aborts have not returned; the process ends without them", busy)

    def rescue(self, reason: str, wherever: bool) -> None:
        """NCCL does not promise that a communicator may be aborted while its owner is inside a call to it."""
        logger.error("all links of this rank are given up: %s", reason)
        for end in list(self._ends):
            assert isinstance(end, NcclEnd)
            end.rescue(reason, wherever)


def make_links(settings: LinkSettings) -> NcclLinks:
    """On a CUDA device, the current one by default. Raises ValueError with a sentence."""
    try:
        on = CudaDevice(torch.device("cuda", cuda_index(settings.device)))
        nccl = nccl_bindings.load_nccl(settings.nccl_channels)
        nccl_bindings.allow_shared_gpus(nccl)
        if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
            logger.warning(
                "NCCL_CUMEM_ENABLE is 0, so NCCL shares memory over NVLink by CUDA's older calls: if a peer "
                "is killed, what this process has open of its memory is undefined. Leave the variable unset"
            )
        if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
            logger.warning(
                "NCCL_LAUNCH_ORDER_IMPLICIT is 1, so links and vLLM's collectives may wait for each other, "
                "and NCCL fails where two threads launch at once, as p2pkv's and vLLM's do. Leave the "
                "variable unset"
            )
        flow = settings.nccl_in_flight, settings.nccl_group_bytes
        return NcclLinks(nccl, on, settings.staging_bytes, INIT_SECONDS, *flow)
    except (NcclMissing, MemoryError) as error:
        raise ValueError(str(error)) from None
