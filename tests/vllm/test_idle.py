"""Real servers rest while they wait for one another, where vLLM by itself would step and spin."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers
from p2pkv.demo.processes import group_members, wait_until
from p2pkv.demo.servers import VllmServer
from p2pkv.pairing import Address
from support.servers.fleet import CHUNK, MODEL_NAME, Fleet, assert_same, paired_headers, tokens

SECONDS = 2.0
MOST = 0.5
"""Of a processor, for all of D's processes: 0.14 were measured with the rest and the naps, 1.5 without."""


def test_a_d_that_waits_for_p_rests(fleet: Fleet) -> None:
    prompt, headers = tokens(CHUNK + 40, "idle"), paired_headers(fleet.p, fleet.d)
    expected = answers.complete(fleet.single.base_url, MODEL_NAME, prompt)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(answers.complete, fleet.d.base_url, MODEL_NAME, prompt, headers=headers)
        wait_until(lambda: inspect(Address.parse(fleet.d.zmq_address))["requests"] == 1, "D to wait for P")
        used, begin = processor_seconds(fleet.d), time.monotonic()
        while time.monotonic() < begin + SECONDS:
            time.sleep(0.1)
        used = processor_seconds(fleet.d) - used
        share = used / (time.monotonic() - begin)
        assert not waiting.done()
        answers.complete(fleet.p.base_url, MODEL_NAME, prompt, max_tokens=1, headers=headers)
        assert_same(expected, waiting.result())
    assert share < MOST, f"D used {share:.2f} of a processor while it waited"


def test_nothing_keeps_p2pkv_from_letting_this_vllm_rest(fleet: Fleet) -> None:
    for server in (fleet.p, fleet.d):
        log = server.log_path.read_text()
        assert "nothing to compute" not in log, f"{server.name} says why it does not rest"


def processor_seconds(server: VllmServer) -> float:
    times = [psutil.Process(each).cpu_times() for each in group_members(server.pid)]
    return sum(each.user + each.system for each in times)
