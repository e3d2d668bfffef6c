"""turboquant web: the function behind the page, and what is said without gradio."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import refused
from turboquant_nb.cli.app import Usage
from turboquant_nb.cli.generate import Conversation, Length, Writing, answering
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.testing import raises


def test_an_answer_is_that_of_a_new_conversation_on_codes(tiny, plain):
    "With a chat template and without one, whatever form gradio gives a message."
    how = Writing(Length(max_new_tokens=6))
    for folder in (tiny, plain):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer, made = AutoTokenizer.from_pretrained(folder), []

        def new_cache(model=model, made=made):
            made.append(TurboQuantCache(model, "k3v3"))
            return made[-1]

        answer = answering(model, tokenizer, new_cache, how)
        chat = bool(tokenizer.chat_template)
        talk = Conversation(model, tokenizer, lambda m=model: TurboQuantCache(m, "k3v3"), chat)
        first, held = answer("Call me Ishmael.", [])
        assert first == talk.turn("Call me Ishmael.", 6)
        assert f"{talk.cache.get_seq_length()} tokens in " in held
        texts = ["Call me Ishmael.", first]
        said = [dict(role=r, content=x) for r, x in zip(("user", "assistant"), texts)]
        parts = [dict(x, content=[dict(type="text", text=x["content"])]) for x in said]
        again = answer("Some years ago", said)
        assert again == answer("Some years ago", parts) and len(made) == 3
        assert made[-1].get_seq_length() > made[0].get_seq_length()
    with raises(Usage, "tokens; this model reads 1 to 127"):
        answer("whale " * 200, [])


def test_without_gradio_its_extra_is_named(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    refused(call("web"), "turboquant web needs gradio", "turboquant-nb[web]", code=1)
