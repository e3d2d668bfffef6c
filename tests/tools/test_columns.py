"""The experiments that set presets beside others and count answers: KIVI's codes as its paper
has them, what is coded when, bits of caches that are not ours, judges of answers, counts."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
pytest.importorskip("run")
from bench import generate
from eval import agents, columns


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_kivi_codes_lie_between_the_ends_of_their_groups():
    "Source: Liu et al. 2024, section 3: a scale and a zero for each 32 numbers."
    x = normal(2, 3, 8, 64)
    groups = x.unflatten(-1, (2, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 3
    got = columns.min_max(x, 2).unflatten(-1, (2, 32))
    assert ((got - groups).abs() <= step[..., None] / 2 + 4e-3).all()
    assert all(len(row.unique()) <= 4 for row in got.flatten(0, 3))
    assert columns.kivi(2).bits == (3, 3)  # two bits, and 16 for each end of 32 numbers


def test_channels_of_keys_with_outliers_want_groups_along_tokens():
    "What KIVI shows of keys, and its mutant: the same groups along channels."
    k = normal(1, 1, 128, 64) * torch.where(torch.arange(64) % 16 == 3, 20.0, 1.0)
    along, across = (columns.kivi(2).code(None, 0, k, k)[i] for i in (0, 1))
    gap = lambda x: float((x - k)[..., 0].square().mean())
    assert 3 * gap(along) < 1 < gap(across)


def test_kivi_keeps_its_newest_values_and_less_than_a_residual_of_keys():
    layer = columns.KiviLayer(columns.kivi(2).code, 0)
    k, v = normal(1, 1, 700, 32), normal(1, 1, 700, 32)
    for a, b in ((0, 512), (512, 639), (639, 640), (640, 700)):
        keys, values = layer.update(k[:, :, a:b], v[:, :, a:b])
        due = a // 128 * 128
        for got, given, exact in ((keys, k, due), (values, v, max(0, due - 128))):
            same = (got == given[:, :, :b]).all(-1)[0, 0]
            assert same[exact:].all() and not same[:exact].any()


def test_bits_of_a_counted_cache_are_those_of_codes_and_exact_tokens():
    model = generate.make_model(generate.TINY)
    codec = columns.Codec(lambda _layer, _start, *both: both, (3, 5))
    for exact, want in (((0, 0), 4), ((2, 4), (3 * 6 + 5 * 4 + 16 * 6) / 16)):
        cache = columns.Counted(model, codec, exact=exact)
        model(torch.zeros(1, 8, dtype=torch.long), past_key_values=cache)
        assert cache.report()["bits_per_value"] == want


CALL = {"area": {"base": [10], "unit": ["units", ""], "name": ["Big Box"]}}


@pytest.mark.parametrize(
    "answer, right",
    [
        ('{"name": "area", "arguments": {"base": 10, "name": "big-box"}}', True),
        ('Sure: ```{"name": "area", "arguments": {"base": 10.0, "name": "Big Box"}}```', True),
        ('{"name": "area", "arguments": {"base": 11, "name": "Big Box"}}', False),
        ('{"name": "area", "arguments": {"base": 10}}', False),
        ('{"name": "area", "arguments": {"base": 10, "name": "Big Box", "more": 1}}', False),
        ('{"name": "volume", "arguments": {"base": 10, "name": "Big Box"}}', False),
        ("area(10)", False),
    ],
)
def test_a_call_is_right_if_its_arguments_are_allowed(answer, right):
    assert agents.right_call(answer, CALL) is right


def test_answers_are_judged_by_what_they_say_last():
    assert agents.last_number("2 + 3 = 5. The answer is 1,205.", "1205")
    assert not agents.last_number("The answer is 5, or 6", "5")
    assert agents.boxed("so \\boxed{1} or \\boxed{\\dfrac{1}{2}}") == "\\frac12"
    assert agents.boxed("none") == ""
    wanted = {"a": {"type": "string"}}
    assert agents.copied(f"```json\n{json.dumps(wanted)}\n```", wanted)
    assert not agents.copied('{"a": {"type": "number"}}', wanted)
    assert agents.holds("It is 123 456.", "123456") and not agents.holds("12345", "123456")


def test_counts_are_paired():
    exact = [True] * 60 + [False] * 40
    right = [False] * 12 + [True] * 48 + [True] * 3 + [False] * 37
    found = agents.counted(right, exact)
    assert (found["right"], found["lost"], found["gained"]) == (51, 12, 3)
    assert abs(found["p"] - 0.03515625) < 1e-12  # 2 · (1 + 15 + 105 + 455) / 2**15
    assert found["net_low"] < found["net"] == 9 < found["net_high"] < 15
    assert 9 < found["finds"] <= 15 and agents.finds(4, 100) is None
    assert found["each"] == "".join("01"[x] for x in right)
