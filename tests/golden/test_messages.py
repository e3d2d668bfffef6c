"No message of an error is lost: each that the package had is still written somewhere in it."

import ast
import json

from tests.golden import messages

# Messages that are meant to be gone: of a module, or the message itself, and why.
_LEAST = 'cli/app says it for every number that has a least: "{} must be at least {}, got {}"'
GONE: dict[str, str] = {
    "--threads must be at least 1, got 0": _LEAST,
    "--batch must be at least 1, got {}": _LEAST,
    "--apart must be at least 1, got {}": _LEAST,
    "{} must be at least 1, got {}": _LEAST,
}


def recorded():
    return json.loads(messages.FILE.read_text(encoding="utf-8"))


def lost(before, now):
    "[(module, message)] of what no module says any more."
    return [
        (module, text)
        for module, texts in before.items()
        for text in texts
        if text not in now and not {module, text} & GONE.keys()
    ]


def test_every_message_is_still_there():
    now = {text for _, tree in messages.modules() for text in messages.strings(tree)}
    assert lost(recorded(), now) == []


def test_what_is_gone_is_gone_and_was_there():
    before = recorded()
    known = {*before, *(text for texts in before.values() for text in texts)}
    assert GONE.keys() <= known and all(GONE.values())
    assert not GONE.keys() & {name for name, _ in messages.modules()}


def test_a_lost_message_is_seen():
    "Words count, expressions do not; a sum is one message; a reason counts as an error does."
    tree = ast.parse(
        "def f(x):\n"
        "    raise ValueError(f'x must be at least {low}, got {x}' + ' of three')\n"
        "def why_not(store):\n"
        "    return False, f'no kernel reads {store.bits} bits' if store else ''\n"
    )
    first, second = "x must be at least {}, got {} of three", "no kernel reads {} bits"
    assert messages.messages(tree) == {first, second}
    assert lost({"m": [first, second]}, {first}) == [("m", second)]
