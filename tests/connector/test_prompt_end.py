"""An answer has the same text whether vLLM decodes a prompt's end or all of it: the patch `prompt_end`."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer as Vllms

from p2pkv.connector.vllm_patches import PromptEnd

BYTES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "ByteLevel": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "Llama": decoders.Sequence([*BYTES, decoders.Strip(" ", 1, 0)]),
    "Gemma": decoders.Sequence(BYTES),
    "WordPiece": decoders.WordPiece(),
    "another": decoders.Sequence([*BYTES, decoders.Replace("aa", "")]),
}
PIECES = ["", *"▁a.жÿ\ufffdĊĢ", "▁▁", "▁a", "b▁", "##", "##c", "<0x0A>", "<0x61>", "<0xFF>", "<s>"]
# Characters whose tokens are their bytes.
PIECES += ["Ð ¶", "ã ģ Ĥ", "ï ¿ ½", "<0xD0> <0xB6>", "<0xE3> <0x81> <0x82>", "<0xEF> <0xBF> <0xBD>"]
NUMBERS = {token: number for number, token in enumerate(dict.fromkeys(" ".join(PIECES).split(" ")))}
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1).map(lambda pieces: " ".join(pieces).split(" "))


def detokenizer(kind: str, prompt: list[str], skip: bool, end: int) -> Vllms:
    """vLLM's, which is to have so many tokens of the prompt; 0: all."""
    tokenizer, patch = Tokenizer(models.BPE(vocab=NUMBERS, merges=[])), PromptEnd()
    tokenizer.decoder, patch.LENGTH = DECODERS[kind], end
    tokenizer.add_special_tokens(["<s>"])
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=False)
    ids = [NUMBERS[token] for token in prompt]
    request = SimpleNamespace(request_id="", prompt_token_ids=ids, sampling_params=params)
    made = Vllms.__new__(Vllms)
    patch.instead_of_init__(Vllms.__init__, made, SimpleNamespace(_tokenizer=tokenizer), request)
    return made


@pytest.mark.parametrize("kind", DECODERS)
@given(TEXTS, st.integers(0, 3), TEXTS, st.booleans(), st.integers(1, 6))
def test_any_answer(kind: str, prompt: list[str], cut: int, answer: list[str], skip: bool, end: int) -> None:
    whole, short = (detokenizer(kind, prompt[: len(prompt) - cut], skip, each) for each in (0, end))
    for token in answer:
        assert short.decode_next(NUMBERS[token]) == whole.decode_next(NUMBERS[token])


@pytest.mark.parametrize("kind", DECODERS)
def test_which_ends_suffice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "DecodeStream", SimpleNamespace)
    ends = ["▁a b▁ <s>", "ж <0xD0> <0xB6>", "<0x0A> <0xD0> <0xB6>", "ж ж \ufffd", "<s> <s> <s>"]
    lengths = [len(detokenizer(kind, ["a", *end.split()], True, 3).stream.ids) for end in ends]
    assert lengths == ([3, 3, 4, 4, 4] if kind in list(DECODERS)[:4] else [4] * 5)
