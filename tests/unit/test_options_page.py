"""docs/options.md is made from the declarations: what these must have, and what is written by hand there."""

from __future__ import annotations

import pytest
from options_page import DEPENDS, SECTIONS, declared

from p2pkv import config
from p2pkv.config import MIB, Options


def options(**given: object) -> Options:
    extra = {"secret_file": None, **given}
    return Options.from_extra(
        extra, role="kv_consumer", kv_port=None, default_host="127.0.0.1", has_gpu=False, environ={}
    )


def test_every_field_says_what_it_is() -> None:
    said = declared()
    assert said.keys() == set(Options.__struct_fields__)
    for name in said.keys() - set(config.OPTIONS):
        assert said[name][0].startswith("Not an option: ")


@pytest.mark.parametrize("name", config.OPTIONS)
def test_each_option_has_a_unit_whether_it_must_be_the_same_and_a_meaning(name: str) -> None:
    about = declared()[name]
    assert len(about) == 3 and all(about)


def test_the_defaults_that_are_written_by_hand() -> None:
    assert {*DEPENDS, *SECTIONS} <= {*config.OPTIONS}
    assert DEPENDS["staging_bytes"] == (
        "1/128 of the GPU's memory, from 64 MiB to 1 GiB; 64 MiB without a GPU"
    )
    gib = 1024 * MIB
    assert [config.default_staging(size * gib) for size in (0, 4, 16, 80, 192)] == [
        *(64 * MIB, 64 * MIB, 128 * MIB, 640 * MIB, 1024 * MIB)
    ]
    made = options()
    assert (made.host, made.kv_port) == ("127.0.0.1", 14579)
    assert (made.discovery, made.allowed_peers, made.prefetch_bytes) == ("plain", None, 0)
