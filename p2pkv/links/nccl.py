"""NCCL links: one communicator of two ranks for each link, slots in device memory, nothing that waits.

P names the communicator in its invitation; each side joins it on a helper thread, and a first small
message makes NCCL connect the two, so that a request finds a warm link. A communicator that does not
come up, or whose abort does not come back, is left behind with its thread; the pair starts afresh under
a new name.
"""

from __future__ import annotations

import logging
import secrets

import torch

from p2pkv.links.base import Inbound, LinkError, LinkFactory, Outbound
from p2pkv.links.blobs import NONCE_BYTES, decode, encode
from p2pkv.links.guard import Guard
from p2pkv.links.nccl_api import Nccl, NcclError, NcclMissing, load_nccl, version_name
from p2pkv.links.nccl_blobs import Acceptance, Invitation, check_versions
from p2pkv.links.nccl_device import CudaDevice, Device
from p2pkv.links.nccl_end import End, Operation, to_landing
from p2pkv.links.nccl_opening import Shared
from p2pkv.links.nccl_pool import Pool
from p2pkv.links.slots import Slots, aligned

logger = logging.getLogger(__name__)

INIT_SECONDS = 30.0
CLOSE_SECONDS = 2.0


class NcclReceive:
    """One posted receive."""

    def __init__(self, link: NcclInbound, operation: Operation, landing: int) -> None:
        self.buffer = operation.buffer
        self.landing = landing
        self._link = link
        self._operation = operation

    def done(self) -> bool:
        """Whether all bytes have arrived, as of the last `poll`."""
        self._link.check()
        return self._operation.finished

    def release(self) -> None:
        """Return the room; if bytes are still on their way, as soon as they have arrived. Idempotent."""
        self._link.release(self._operation)


class NcclInbound(End, Inbound):
    """D's end. Its window bounds what it may hold of the slots that all links of the rank share."""

    def __init__(self, shared: Shared, unique_id: bytes, window: int) -> None:
        self._window = Slots(window).capacity
        super().__init__(shared, "the NCCL link from a peer", unique_id, rank=1)

    def post(self, nbytes: int) -> NcclReceive | None:
        """Post the next receive, or None while there is no room for it, or too many links are busy."""
        self.check()
        if nbytes > self._window:
            raise ValueError(f"a message of {nbytes} bytes can never fit a window of {self._window} bytes")
        self.shared.pool.check(nbytes)
        if self.used + aligned(nbytes) > self._window or not self.admitted():
            return None
        offset = self.shared.pool.take(nbytes)
        if offset is None:
            return None
        operation = Operation(offset, self.shared.pool.tensor(offset, nbytes))
        receive = NcclReceive(self, operation, to_landing(self.sequence, nbytes))
        self.enqueue(operation)
        self.want(operation)
        return receive

    def release(self, operation: Operation) -> None:
        """A receive's bytes have been read."""
        self.guard.owned()
        if not operation.released:
            operation.released = True
            if operation.finished and operation in self.operations:
                self.free(operation)

    def finished(self, operation: Operation) -> None:
        if operation.released:
            self.free(operation)

    def __repr__(self) -> str:
        return f"NcclInbound(posted {self.sequence}, {self.used} bytes held)"


class NcclSend:
    """One send."""

    def __init__(self, link: NcclOutbound, operation: Operation) -> None:
        self.buffer = operation.buffer
        self._link = link
        self._operation = operation

    def commit(self) -> None:
        """Hand the buffer over; NCCL reads it when the current stream has written it."""
        self._link.check()
        self._link.want(self._operation)

    def done(self) -> bool:
        """Whether D's receive has taken the bytes, as of the last `poll`."""
        self._link.check()
        return self._operation.finished


class NcclOutbound(End, Outbound):
    """P's end."""

    def __init__(self, shared: Shared, unique_id: bytes) -> None:
        super().__init__(shared, "the NCCL link to a peer", unique_id, rank=0)

    def reserve(self, nbytes: int, landing: int) -> NcclSend | None:
        """A buffer, or None while the rank's slots are taken. ValueError if it never has room.

        Raises LinkError if the grant is not the next one, or for another size: NCCL would not notice.
        """
        self.check()
        self.shared.pool.check(nbytes)
        if landing != to_landing(self.sequence, nbytes):
            raise self.guard.fail(
                f"landing {landing} is not that of message {self.sequence} with {nbytes} bytes; grants must "
                "be used in order, and filled"
            )
        if not self.admitted():
            return None
        offset = self.shared.pool.take_fairly(nbytes, self.used)
        if offset is None:
            return None
        operation = Operation(offset, self.shared.pool.tensor(offset, nbytes))
        self.enqueue(operation)
        return NcclSend(self, operation)

    def finished(self, operation: Operation) -> None:
        self.free(operation)

    def __repr__(self) -> str:
        return f"NcclOutbound(reserved {self.sequence}, {self.used} bytes held)"


class NcclLinks(LinkFactory):
    """Makes NCCL links for one rank. One thread owns all of them (the engine's): a second one is refused.

    `kind` names NCCL's exact version, so that peers with another one are refused at the handshake.
    """

    def __init__(
        self, nccl: Nccl, device: Device, staging_bytes: int, init_seconds: float = INIT_SECONDS
    ) -> None:
        """Raises ValueError if there is no staging, MemoryError if the device has no room for it.

        Args:
            nccl: the binding.
            device: where the KV is.
            staging_bytes: device memory of the slots that all links of this rank share.
            init_seconds: how long a communicator may take to come up.
        """
        owner = Guard(f"NCCL on {device.name}")
        self._shared = Shared(nccl, device, Pool(device, staging_bytes), init_seconds, owner)
        self._version = nccl.version()
        self.kind = f"nccl {version_name(self._version)}"
        self._links: list[NcclInbound | NcclOutbound] = []
        self._closed = False
        logger.info("%s on %s", nccl.describe(), device.name)

    @property
    def stuck(self) -> int:
        """Calls to NCCL that were given up and have not come back."""
        return self._shared.stuck

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots in use, those included that a stuck abort holds; 0 at the baseline."""
        return self._shared.pool.used

    def invite(self) -> bytes:
        """The name of a new communicator, and this rank's NCCL version."""
        self._check()
        try:
            name = self._shared.nccl.unique_id()
        except NcclError as error:
            raise LinkError(str(error)) from None
        tag = secrets.token_bytes(NONCE_BYTES)
        return encode(Invitation(kind="nccl", version=1, tag=tag, nccl=self._version, unique_id=name))

    def accept(self, invitation: bytes, window: int) -> tuple[NcclInbound, bytes]:
        """D's end, which begins to join. ValueError if `window` is not positive."""
        self._check()
        invited = decode(invitation, Invitation, "nccl")
        check_versions(self._version, invited.nccl)
        inbound = NcclInbound(self._shared, invited.unique_id, window)
        self._links.append(inbound)
        return inbound, encode(Acceptance(kind="nccl", version=1, answers=invited.tag, nccl=self._version))

    def complete(self, invitation: bytes, acceptance: bytes) -> NcclOutbound:
        """P's end, which begins to join."""
        self._check()
        invited = decode(invitation, Invitation, "nccl")
        accepted = decode(acceptance, Acceptance, "nccl")
        if accepted.answers != invited.tag:
            raise LinkError("this acceptance answers another invitation")
        check_versions(self._version, accepted.nccl)
        outbound = NcclOutbound(self._shared, invited.unique_id)
        self._links.append(outbound)
        return outbound

    def close(self) -> None:
        """Abort every link of this rank, and give NCCL a moment to let go. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            link.close("its rank has closed")
        self._links.clear()
        self._shared.aborts.join(CLOSE_SECONDS)
        if busy := self._shared.aborts.busy:
            logger.warning("%d aborts of NCCL have not returned; the process ends without them", busy)

    def _check(self) -> None:
        if self._closed:
            raise LinkError("this rank's links are closed")
        self._links = [link for link in self._links if not link.closed]
        self._shared.check()


def cuda_links(staging_bytes: int, *, device: torch.device | None = None, channels: int = 8) -> NcclLinks:
    """NCCL links on a CUDA device, the current one by default.

    Raises ValueError with a sentence if there is no device, no binding, or no memory.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "the NCCL link needs a CUDA device, and torch finds none; set the option `link` to `host`"
        )
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    try:
        return NcclLinks(load_nccl(channels), CudaDevice(torch.device("cuda", index)), staging_bytes)
    except (NcclMissing, MemoryError) as error:
        raise ValueError(str(error)) from None
