"""Each fault that we know of, what a user sees of it, and the tests that show it; and tests that pages name.

"By policy" is D's `kv_load_failure_policy`: the right answer, computed on D, or an HTTP error. `make chaos`
draws most of these faults at random, besides.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAULTS = {
    "kill -9 of P under requests, behind the proxy": (
        "the answer, of another P or D alone",
        "proxy/test_alone.py vllm/test_dead_peers.py",
    ),
    "no P at all": (
        "D alone; 503 beyond --alone-share",
        "vllm/test_dead_peers.py proxy/test_alone.py",
    ),
    "kill -9 of P at a layer": (
        "by policy, within the lease",
        "engine/test_shutdown_processes.py vllm/test_faults.py engine/test_faults.py "
        "vllm/test_hybrid_faults.py",
    ),
    "kill -9 of P after the last acknowledgement": (
        "the answer",
        "proxy/test_failures.py protocol/test_receiver_faults.py vllm/test_dead_peers.py",
    ),
    "kill -9 of D in mid-transfer": (
        "another D's answer, 502, or an error event; P's blocks free within a lease",
        "engine/test_faults.py proxy/test_retries.py proxy/test_failures.py vllm/test_dead_peers.py",
    ),
    "SIGSTOP of P or D, later SIGCONT": (
        "shorter than the lease nothing; longer by policy; of D: another D's answer or 502",
        "links/test_contract.py links/test_faulty.py engine/test_nccl.py vllm/test_dead_peers.py "
        "vllm/test_hybrid_faults.py proxy/test_failures.py proxy/test_alone.py",
    ),
    "a worker holds its interpreter's lock for 15 s": (
        "nothing",
        "engine/test_held_lock.py virtual/test_silence.py control/test_announcer.py",
    ),
    "a machine that stands still": (
        "nothing",
        "virtual/test_silence.py",
    ),
    "a hung application thread": (
        "as SIGSTOP, after stall_seconds",
        "virtual/test_silence.py connector/test_worker.py",
    ),
    "partition one way, both ways, healed": (
        "by policy; works again about 20 s after its end",
        "chaos/test_partitions.py virtual/test_walks.py",
    ),
    "loss, latency, slicing": (
        "slower; frozen beyond the lease: by policy",
        "chaos/test_rough.py chaos/test_partitions.py links/test_faulty.py",
    ),
    "reset connections": (
        "by policy if one was loading",
        "chaos/test_rough.py control/test_endpoint.py",
    ),
    "an engine core alone is stopped": (
        "the answer after stall_seconds and a lease; another D's after the proxy's lease",
        "vllm/test_engine_cores.py virtual/test_engine_cores.py connector/test_core_beats.py "
        "proxy/test_paused_engines.py",
    ),
    "/pause on P or D, each mode, under load": (
        "the answer; what a paused D has begun waits",
        "vllm/test_engine_cores.py proxy/test_paused_engines.py",
    ),
    "one D of several takes nothing": (
        "its requests wait, wait_seconds at most",
        "connector/test_held_blocks.py virtual/test_engine_cores.py",
    ),
    "vLLM's HTTP server alone is killed": (
        "as a kill",
        "vllm/test_engine_cores.py virtual/test_engine_cores.py connector/test_core_beats.py",
    ),
    "the engine thread ends": (
        "as a kill, from its next step on",
        "engine/test_thread_end.py",
    ),
    "crossed admission": (
        "waits; by policy after stall_seconds if preempted",
        "connector/test_crossed_admission.py virtual/test_silence.py",
    ),
    "a store beside p2pkv fails to load on P, or P fails where D's store has the prompt": (
        "P computes or fails, D gets nothing of it; D's store answers",
        "connector/test_multi.py",
    ),
    "slow D": (
        "its requests wait",
        "engine/test_backpressure.py links/test_host_memory.py",
    ),
    "staging exhausted": (
        "requests wait; chunks_waited grows",
        "engine/test_backpressure.py engine/test_push.py",
    ),
    "truncated, mutated, nested messages, duplicate keys, huge numbers": (
        "nothing; messages_bad grows",
        "engine/test_hostile.py protocol/test_messages.py proxy/test_hostile.py",
    ),
    "raw TCP bytes, ZMTP 1 and 2, half a greeting": (
        "nothing; handshakes_failed grows",
        "engine/test_hostile.py proxy/test_secret.py",
    ),
    "oversize messages, many frames": (
        "nothing; the connection closes",
        "engine/test_hostile.py",
    ),
    "idle connections without end, no descriptors left": (
        "meanwhile only connected P's work",
        "engine/test_hostile.py proxy/test_hostile.py engine/test_descriptors.py",
    ),
    "one connection claims to be many; grants without end": (
        "nothing; the link ends",
        "engine/test_hostile.py",
    ),
    "send to a dead peer": (
        "by policy, within the lease",
        "control/test_endpoint.py engine/test_faults.py",
    ),
    "replay of recorded bytes": (
        "nothing",
        "virtual/test_walks.py protocol/test_receiver_faults.py protocol/test_sender_faults.py",
    ),
    "a D names another D's transfer": (
        "nothing",
        "engine/test_hostile.py",
    ),
    "a D names a TCP address outside of allowed_peers": (
        "not dialed",
        "links/test_host.py",
    ),
    "duplicate transfer id": (
        "served, without a push while the first is active",
        "connector/test_decode_side.py connector/test_prefill_side.py",
    ),
    "forged request id": (
        "no KV leaves; by policy",
        "engine/test_membership.py proxy/test_requests.py",
    ),
    "registering another's address, or without the secret": (
        "nothing; claims_refused grows",
        "proxy/test_claims.py proxy/test_secret.py proxy/test_membership.py",
    ),
    "clients: no HTTP, bodies that do not come, answers not read": (
        "4xx or a closed connection",
        "proxy/test_rude_clients.py",
    ),
    "connections without end; bodies of any size and content": (
        "503 or 413, and no instance sees them",
        "proxy/test_rude_clients.py proxy/test_large_bodies.py",
    ),
    "a request whose answer repeats what vLLM writes when it gives up": (
        "the answer; no instance is paused",
        "proxy/test_given_up.py vllm/test_endpoints.py",
    ),
    "an engine hangs behind a living server": (
        "another D's answer; else an error after the lease, and streams end after 5 s",
        "proxy/test_hung.py vllm/test_hung_engine.py",
    ),
    "instances: garbage, half an answer, endless headers": (
        "502 or an error event",
        "proxy/test_rude_instances.py",
    ),
    "a client leaves, at every stage": (
        "both sides free their blocks",
        "vllm/test_clients_that_leave.py vllm/test_hybrid_faults.py connector/test_cancel.py "
        "connector/test_decode_side.py connector/test_prefill_side.py engine/test_faults.py "
        "engine/test_push.py proxy/test_clients_that_leave.py",
    ),
    "a client leaves in the proxy's queue": (
        "nothing reaches an instance",
        "proxy/test_admission.py proxy/test_rude_clients.py",
    ),
    "version, model, type, layers or heads differ": (
        "refused, both values logged; by policy",
        "engine/test_faults.py protocol/test_handshake.py vllm/test_faults.py",
    ),
    "wall clock jumps": (
        "nothing",
        "unit/test_imports.py engine/test_clock.py",
    ),
    "the proxy restarts": (
        "503 with Retry-After until the next ping",
        "proxy/test_stopping.py proxy/test_pinger.py proxy/test_membership.py",
    ),
    "an instance restarts under its address": (
        "the next request works",
        "engine/test_faults.py control/test_endpoint.py proxy/test_membership.py",
    ),
    "one lost ping, or none for longer over a standing connection": (
        "nothing for 30 s; others are preferred",
        "proxy/test_registry.py proxy/test_failures.py proxy/test_claims.py proxy/test_alone.py",
    ),
    "an idle connection closes as it is used": (
        "nothing",
        "proxy/test_upstream.py connector/test_cancel.py connector/test_prefill_side.py",
    ),
    "thundering herd": (
        "waits in order; 503 beyond the limits",
        "proxy/test_admission.py proxy/test_places.py proxy/test_retries.py",
    ),
    "a P that comes and goes": (
        "nothing",
        "proxy/test_breaker.py proxy/test_retries.py protocol/test_handshake.py proxy/test_membership.py",
    ),
    "a stream fails before its first token": (
        "another D's answer, or 502",
        "proxy/test_first_event.py",
    ),
    "the host of a leaver vanishes (the kernel's probes are on; no host is taken away)": (
        "what it worked on fails after 20 s",
        "proxy/test_upstream.py",
    ),
    "failure after the first byte": (
        "an error event or a JSON cut off; no second try",
        "proxy/test_retries.py proxy/test_failures.py proxy/test_rude_instances.py",
    ),
    "instances join, drain, leave or die under 64 streams": (
        "nothing, but streams of a killed D",
        "proxy/test_churn.py",
    ),
    "thousands of requests, failures of all kinds": (
        "answers or errors; nothing leaks, 5 MiB at most",
        "proxy/test_soak.py",
    ),
    "SIGTERM of the proxy under load": (
        "requests end; others 503; error events after --drain-seconds",
        "proxy/test_stopping.py",
    ),
    "SIGTERM of P or D under load": (
        "P: what is computed arrives, D takes it within 2 s, else by policy; D: a second try, an "
        "error or error event",
        "proxy/test_stopping.py proxy/test_membership.py engine/test_shutdown.py "
        "engine/test_shutdown_processes.py proxy/test_process.py proxy/test_given_up.py "
        "vllm/test_graceful_stop.py vllm/test_dead_peers.py",
    ),
    "a P that stops gives a request up": (
        "D's policy; D is not blamed",
        "proxy/test_given_up.py proxy/test_membership.py proxy/test_alone.py",
    ),
    "a rolling upgrade under 16 streams": (
        "nothing",
        "vllm/test_upgrade.py proxy/test_fit.py",
    ),
    "a flipped byte of KV": (
        "with verify by policy before the first token; without a wrong answer",
        "engine/test_verify.py engine/test_device.py engine/test_kv_groups.py kv/test_digest.py "
        "virtual/test_walks.py",
    ),
    "NCCL: an absent peer, an abort in a send (on a simulated NCCL; on GPUs: no test yet)": (
        "by policy; links_stuck may grow",
        "links/test_nccl.py links/test_nccl_processes.py",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_a_test(fault: str) -> None:
    seen, tests = FAULTS[fault]
    assert seen and tests
    assert [name for name in tests.split() if not (ROOT / "tests" / name).is_file()] == []


MATRIX = (ROOT / "docs" / "compatibility.md").read_text()
CLAIMED = sorted(set(re.findall(r"`((?:tests/\S*|test_\w+\.py)(?:::\w+)?)`", MATRIX)))


@pytest.mark.parametrize("name", CLAIMED)
def test_what_the_compatibility_page_names_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    files = [ROOT / path] if "/" in path else sorted((ROOT / "tests").rglob(path))
    assert files and all(file.exists() for file in files)
    assert not function or any(f"def {function}(" in file.read_text() for file in files)


def test_no_request_is_ticked_without_a_test() -> None:
    rows = MATRIX.split("## Requests")[1].split("## ")[0].splitlines()
    ticked = [row for row in rows if row.startswith("| ") and "✓" in row]
    assert len(ticked) > 10
    assert [row for row in ticked if "`test_" not in row and "`tests/" not in row] == []
