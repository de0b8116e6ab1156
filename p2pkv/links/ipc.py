"""CUDA IPC links: P writes into D's device memory, within one host. No communicator, no kernel that waits.

For two servers on one GPU, and for GPUs of one host that reach each other's memory (NVLink). D's staging is
one block, which P maps once for all its links to that rank.
"""

import logging
import os
import secrets
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta

from p2pkv.device import cuda_index
from p2pkv.links.base import NONCE_BYTES, Acceptance, Invitation, LinkError, LinkFactory, LinkSettings, Nonce
from p2pkv.links.cuda_memory import UUID_BYTES, CudaError, CudaMemory, ExportedBlock, allocate
from p2pkv.links.gpu import CudaDevice, DevicePool, pause_of
from p2pkv.links.ipc_ends import IpcContext, IpcInbound, IpcOutbound
from p2pkv.links.ipc_socket import dial
from p2pkv.links.shared_memory import Number, Text
from p2pkv.links.staging import StagingBudget

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.00002
"""Between two looks of P at its events, and of D at the socket: adds to the time of each message."""

BUILD_SECONDS = 30.0
CLOSE_SECONDS = 2.0

Uuid = Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]


class IpcInvitation(Invitation, frozen=True, tag="ipc"):
    """Where P runs: the kernel's boot id, which names the host, and the inode of the network namespace."""

    boot: Text
    network: Number


class IpcAcceptance(Acceptance, frozen=True, tag="ipc"):
    """D's answer: the name of its unix socket, the random name of its memory and its size, its GPU's UUID."""

    door: Nonce
    memory: Nonce
    nbytes: Annotated[int, Meta(ge=1, le=1 << 44)]
    device: Uuid


def this_host() -> tuple[str, int]:
    """The boot id, and the inode of this process's network namespace. Raises ValueError."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot[:64], os.stat("/proc/self/ns/net").st_ino
    except OSError as error:
        raise ValueError(f"the link ipc needs Linux's /proc: {error}") from None


class IpcLinks(LinkFactory):
    kind = "ipc"
    blobs = IpcInvitation, IpcAcceptance
    too_many_stuck = (
        "links to peers that neither answer nor end still hold memory of this rank; end those processes, or "
        "restart this one"
    )
    poll_seconds = POLL_SECONDS
    build_seconds = BUILD_SECONDS

    def __init__(self, device: CudaDevice, driver: CudaMemory, staging_bytes: int, receives: bool) -> None:
        """Raises ValueError with a sentence, MemoryError. `receives`: False: this rank takes no memory."""
        super().__init__()
        self._host = this_host()
        self.staging = StagingBudget(staging_bytes)
        self._name = secrets.token_bytes(NONCE_BYTES)
        blocks: list[ExportedBlock] = []

        def exported(nbytes: int) -> torch.Tensor:
            blocks.append(allocate(driver, nbytes))
            return blocks[0].tensor

        try:
            self._uuid = driver.uuid()
            if not driver.exportable():
                raise ValueError(
                    "the link ipc needs device memory that can be shared as a file descriptor, and "
                    f"{device.name} has none "
                    "(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED is 0); use link=nccl"
                )
            pool = None
            if receives:
                pool = DevicePool(lambda nbytes: device.memory(nbytes, exported), staging_bytes)
        except CudaError as error:
            raise ValueError(f"the link ipc cannot share memory of {device.name}: {error}") from None
        self.shared = IpcContext(device, driver, self.staging, pool, blocks[0] if blocks else None)

    def pause(self) -> float:
        ends = (end for end in self._ends if isinstance(end, IpcInbound | IpcOutbound))
        return pause_of((end.pause() for end in ends if not end.closed), self.poll_seconds)

    @property
    def stuck(self) -> int:
        """Calls to the driver, and aborts, that have outlived their time: a peer is frozen."""
        return self.shared.openings.stuck + self.shared.aborts.stuck

    def _invitation(self, nonce: bytes) -> IpcInvitation:
        boot, network = self._host
        return IpcInvitation(version=1, nonce=nonce, boot=boot, network=network)

    def _accept(self, invited: IpcInvitation, window: int) -> tuple[IpcInbound, IpcAcceptance]:
        boot, network = self._host
        if invited.boot != boot:
            raise LinkError(
                "P runs on another host, and the link ipc works within one; use link=nccl on both sides"
            )
        if invited.network != network:
            raise LinkError(
                "P runs in another network namespace of this host, where D's unix socket cannot be reached: "
                "give both containers the host's network, put them into one pod, or use link=nccl on both "
                "sides"
            )
        if self.shared.block is None:
            raise LinkError("this rank only sends, so it has no memory for a peer to write to")
        inbound = IpcInbound(self.shared, invited.nonce, window)
        return inbound, IpcAcceptance(
            version=1,
            answers=invited.nonce,
            door=inbound.name,
            memory=self._name,
            nbytes=self.shared.block.nbytes,
            device=self._uuid,
        )

    def _complete(self, invited: IpcInvitation, accepted: IpcAcceptance) -> IpcOutbound:
        try:
            reached = self.shared.driver.reaches(accepted.device)
        except CudaError as error:
            raise LinkError(f"CUDA does not say whether this GPU reaches D's: {error}") from None
        if reached is False:
            raise LinkError(
                f"{self.shared.device.name} cannot access the memory of D's GPU (cuDeviceCanAccessPeer is 0; "
                "see `nvidia-smi topo -p2p r`): the link ipc needs one GPU, NVLink or PCIe peer access. Use "
                "link=nccl on both sides"
            )
        try:
            line = dial(accepted.door, invited.nonce)
        except OSError as error:
            raise LinkError(f"D's unix socket cannot be reached: {error}; D may have ended") from None
        return IpcOutbound(self.shared, line, accepted.memory, accepted.nbytes)

    def close(self) -> None:
        """Abort every link of this rank, and wait a moment until its writes have ended. Idempotent."""
        if self._closed:
            return
        sends = [end for end in self._ends if isinstance(end, IpcOutbound)]
        super().close()
        if self.shared.block is not None:
            os.close(self.shared.block.fd)
        if sends:
            self.shared.aborts.join(CLOSE_SECONDS)


def make_links(settings: LinkSettings) -> IpcLinks:
    """On a CUDA device, the current one by default. Raises ValueError with a sentence."""
    index = cuda_index(settings.device)
    try:
        on = CudaDevice(torch.device("cuda", index))
        on.enter()
        return IpcLinks(on, CudaMemory(index), settings.staging_bytes, settings.receives)
    except (CudaError, MemoryError) as error:
        raise ValueError(str(error)) from None
