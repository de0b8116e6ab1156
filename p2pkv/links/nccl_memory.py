"""Device memory that one end of an NCCL communicator of two ranks takes, read in the source of NCCL 2.30.7.

docs/decisions/nccl-memory.md explains the terms. On a card only one sum was measured: this is an expectation.
"""

import os
from collections.abc import Mapping
from enum import IntEnum

MIB = 1 << 20

GRANULE = 2 * MIB
"""With cuMem each allocation is rounded up to its granularity: ncclCuMemAlloc in include/alloc.h."""

OF_A_CHANNEL = 3
"""Allocations of initChannel in channel.cc: two tables of peers, and the ring's ranks."""

OF_A_COMMUNICATOR = 2
"""Allocations of devCommSetup in init.cc: the communicator with its channels, and local ranks."""

LL_BYTES = 8 * 512 * 8 * 16
LL128_BYTES = 120 * 640 * 8 * 8
SIMPLE_BYTES = 4 * MIB
"""Buffers of a connection between GPUs, one for each protocol: DEFAULT_*BUFFSIZE in init.cc, from
include/device.h. Sends and receives use SIMPLE, up to 16 KiB LL, never LL128: addP2pToPlan in enqueue.cc."""

CONTROL_BYTES = 4096
"""ncclSendMem and ncclRecvMem in include/comm.h."""

NET_BYTES_OF_A_CHANNEL = 16 * 128 << 10
"""NCCL_SHARED_STEPS x NCCL_P2P_NET_CHUNKSIZE: sharedNetBuffersInit in transport/net.cc."""

CHANNELS = 8
"""The default of the option nccl_num_channels."""

SAME_ON_BOTH = (
    "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_CHUNK_SIZE", "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_P2P_LL_THRESHOLD", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_NCHANNELS_PER_NET_PEER",
)  # fmt: skip
"""Each rank divides a message into channels (addP2pToPlan in enqueue.cc) and steps (computeBuffSizes in
init.cc) by its own numbers, and a sender finds the receiver's buffers by its own sizes (p2pSendConnect in
transport/p2p.cc). NCCL does not compare them: two ranks then hang, or take stale bytes for those sent."""


class Way(IntEnum):
    """What lies between the two ranks; the value: connections of a peer, at most all channels.
    ncclTopoGetNchannels in graph/paths.cc."""

    NVLINK = 64
    """NVLink of H100 with NVSwitch: more than p2pkv's channels."""
    PCIE = 2
    """PCIe, or one card."""
    NETWORK = 4
    """A 400 Gbit/s adapter with GPUDirect RDMA: one for each 14 GB/s, at least two."""


def end_bytes(channels: int, way: Way, receives: bool) -> int:
    """Bytes of one end. `channels`: of the communicator, a power of two; `receives`: D's end, else P's."""
    total: int = (OF_A_COMMUNICATOR + OF_A_CHANNEL * channels) * GRANULE
    if way is Way.NETWORK:  # one buffer for all connections, of device memory with GPUDirect RDMA
        return total + _granules(channels * NET_BYTES_OF_A_CHANNEL)
    buffers = CONTROL_BYTES + (LL_BYTES + LL128_BYTES + SIMPLE_BYTES if receives else 0)
    total += min(channels, way) * _granules(buffers)
    if way is Way.NVLINK:  # ncclNvlsSetup in transport/nvls.cc, which p2pkv bounds to one channel
        total += 2 * GRANULE
    return total


def division(channels: int, environ: Mapping[str, str] = os.environ) -> str:
    """What both ranks need alike, where it is not the default: "16 channels NCCL_BUFFSIZE=1048576"."""
    found = [f"{channels} channels"] if channels != CHANNELS else []
    return " ".join(found + [f"{name}={environ[name]}" for name in SAME_ON_BOTH if environ.get(name)])


def _granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE
