"""Images and videos: small random models of the vision-language families of transformers, in
float64, in whose language model images are tokens like others, at positions of several axes
(Qwen-VL), between tokens that see one another in both directions (Gemma 3, Molmo2, PaliGemma),
or in layers with a sliding window (Gemma 3, Cohere 2)."""

import copy

import pytest
import torch

from turboquant_nb import Recipe, Spec, TurboQuantCache
from turboquant_nb.testing import same

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from tests.helpers import ONE_THREAD, longer, refuses, seeded

pytestmark = ONE_THREAD

IMAGE, VIDEO, BEGIN, END = 57, 58, 59, 60
TEXT = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
AXES = TEXT | dict(
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
)
EYE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
QWEN_EYE = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=2,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
)
SLIDES = dict(sliding_window=12, layer_types=["sliding_attention", "full_attention"])
QWEN = dict(
    text_config=AXES,
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=BEGIN,
    vision_end_token_id=END,
)
T = transformers


FAMILIES = {  # name: (class of the model, its config)
    "LlavaOnevision": lambda: T.LlavaOnevisionConfig(
        text_config=T.Qwen2Config(**TEXT),
        vision_config=T.SiglipVisionConfig(**EYE, image_size=8, patch_size=4),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[8, 8]],
        vision_feature_layer=-1,
    ),
    "Qwen2_5_VL": lambda: T.Qwen2_5_VLConfig(
        **QWEN, vision_config=QWEN_EYE | dict(window_size=8, fullatt_block_indexes=[0])
    ),
    "Qwen3VL": lambda: T.Qwen3VLConfig(
        **QWEN,
        vision_config=QWEN_EYE | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
    "Gemma3": lambda: T.Gemma3Config(
        text_config=T.Gemma3TextConfig(**TEXT, **SLIDES),
        boi_token_index=BEGIN,
        eoi_token_index=END,
        vision_config=dict(**EYE, image_size=8, patch_size=2),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    ),
    "InternVL": lambda: T.InternVLConfig(
        text_config=T.Qwen2Config(**TEXT),
        vision_config=dict(**EYE, image_size=[8, 8], patch_size=[2, 2]),
        image_token_id=IMAGE,
        downsample_ratio=0.5,
    ),
    "Llava": lambda: T.LlavaConfig(
        text_config=T.LlamaConfig(**TEXT),
        vision_config=T.CLIPVisionConfig(**EYE, image_size=8, patch_size=4),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    ),
    "PaliGemma": lambda: T.PaliGemmaConfig(
        text_config=T.GemmaConfig(**TEXT),
        vision_config=T.SiglipVisionConfig(
            **EYE, image_size=8, patch_size=4, projection_dim=32
        ),
        image_token_index=IMAGE,
        projection_dim=32,
    ),
    "Glm4v": lambda: T.Glm4vConfig(
        text_config=AXES,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=BEGIN,
        image_end_token_id=END,
        video_start_token_id=55,
        video_end_token_id=56,
        vision_config=QWEN_EYE | dict(image_size=8),
    ),
    "Mistral3": lambda: T.Mistral3Config(
        text_config=T.MistralConfig(**TEXT),
        vision_config=T.PixtralVisionConfig(**EYE, head_dim=8, image_size=8, patch_size=2),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    ),
    "Cohere2Vision": lambda: T.Cohere2VisionConfig(
        text_config=T.Cohere2Config(**TEXT, **SLIDES),
        vision_config=T.SiglipVisionConfig(
            **EYE, image_size=8, patch_size=2, vision_use_head=False
        ),
        downsample_factor=2,
        image_token_id=IMAGE,
        alignment_intermediate_size=32,
    ),
    "Molmo2": lambda: T.Molmo2Config(
        text_config=TEXT | dict(additional_vocab_size=8),
        vision_config=EYE
        | dict(num_key_value_heads=2, head_dim=8, image_size=[8, 8], patch_size=2),
        adapter_config=dict(
            hidden_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=24,
            text_hidden_size=32,
            vision_feature_layer=[0],
        ),
        image_patch_id=IMAGE,
        image_start_token_id=BEGIN,
        image_end_token_id=END,
        low_res_image_start_token_id=55,
        frame_start_token_id=53,
        frame_end_token_id=54,
    ),
    "Idefics2": lambda: T.Idefics2Config(
        text_config=T.MistralConfig(**TEXT),
        vision_config=dict(**EYE, image_size=8, patch_size=4),
        image_token_id=IMAGE,
        pad_token_id=0,
        perceiver_config=dict(
            hidden_size=32,
            resampler_n_latents=4,
            resampler_depth=1,
            resampler_n_heads=2,
            num_key_value_heads=1,
            resampler_head_dim=8,
        ),
    ),
}
VIDEOS = ("LlavaOnevision", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "Molmo2")
FAMILIES = {
    name: make for name, make in FAMILIES.items() if hasattr(T, name + "Config")
}  # this transformers may be older
CASES = [(name, False) for name in FAMILIES] + [
    (name, True) for name in VIDEOS if name in FAMILIES
]
_made = {}


def made(name):
    "The model, with weights large enough that its tokens depend on the image."
    if name not in _made:
        torch.manual_seed(0)
        model = (
            getattr(transformers, name + "ForConditionalGeneration")(FAMILIES[name]())
            .eval()
            .double()
        )
        g = seeded()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(0, 0.3, generator=g)
        _made[name] = model
    return _made[name]


def body(name, video):
    "Tokens that stand for an image of 8 x 8 pixels, or for two or four such frames."
    if name == "Qwen3VL" and video:  # each time is a piece of its own
        return [BEGIN, *[VIDEO] * 4, END, 7, 8, BEGIN, *[VIDEO] * 4, END]
    if name.startswith("Qwen"):
        return [BEGIN, *([VIDEO] * 8 if video else [IMAGE] * 4), END]
    if (
        name == "LlavaOnevision"
    ):  # the whole, its only part and a line's end; a token for each frame and one more
        return [VIDEO] * 3 if video else [IMAGE] * 10
    if video:  # Glm4v: frames are images between two marks; Molmo2: an image of more tokens
        return [55, *2 * [BEGIN, *[IMAGE] * 4, END], 56] if name == "Glm4v" else [IMAGE] * 8
    return [BEGIN, *[IMAGE] * 4, END] if name in ("Gemma3", "Glm4v") else [IMAGE] * 4


def asked(name, video=False, seed=0):
    "Two sequences with a picture each; the first has five tokens of padding at its left."
    g = seeded(seed)
    words = torch.randint(2, 50, (2, 15), generator=g).tolist()
    rows = [x[:6] + body(name, video) + x[6:] for x in words]
    rows[0][:5] = [0] * 5
    ids = torch.tensor(rows)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    out, noise = (
        dict(input_ids=ids, attention_mask=mask),
        lambda *shape: torch.randn(2, *shape, generator=g, dtype=torch.float64),
    )
    if name.startswith("Qwen") or name == "Glm4v":
        grid = torch.tensor([[2 if video else 1, 4, 4]] * 2)
        pixels = noise(int(grid[0].prod()), 3 * 2 * 2 * 2).flatten(0, 1)
        kinds = (1 + (video and name == "Glm4v")) * (ids == IMAGE).int() + 2 * (
            ids == VIDEO
        ).int()
        return out | {
            "pixel_values_videos" if video else "pixel_values": pixels,
            "video_grid_thw" if video else "image_grid_thw": grid,
            "mm_token_type_ids": kinds,
        }
    if name == "LlavaOnevision":
        still = dict(
            image_sizes=torch.tensor([[8, 8]] * 2), batch_num_images=torch.tensor([1, 1])
        )
        return out | {
            "pixel_values_videos" if video else "pixel_values": noise(2, 3, 8, 8),
            **({} if video else still),
        }
    if name == "Molmo2":  # four patches of an image or frame for a token
        place, frames = (
            torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]),
            1 + video,
        )
        places = torch.cat([place + 16 * i for i in range(2 * frames)])
        out["mm_token_type_ids"] = (ids == IMAGE).int()
        if video:
            return out | dict(
                pixel_values_videos=noise(2, 16, 12).flatten(0, 1),
                video_token_pooling=places,
                video_grids=torch.tensor([[2, 2, 2]] * 2),
            )
        return out | dict(
            pixel_values=noise(16, 12),
            image_token_pooling=places,
            image_grids=torch.tensor([[2, 2, 0, 0]] * 2),
            image_num_crops=torch.tensor([1, 1]),
        )
    if name == "Mistral3":
        out["image_sizes"] = torch.tensor([[8, 8]] * 2)
    if name in ("Gemma3", "PaliGemma"):
        out["token_type_ids"] = (
            (ids == IMAGE).int() if name == "Gemma3" else torch.zeros_like(ids)
        )
    return out | dict(pixel_values=noise(*[1] * (name == "Idefics2"), 3, 8, 8))


def answer(model, inputs, attention, cache, n=4):
    "(tokens, logits [n, B, vocabulary]) of greedy decoding."
    model.set_attn_implementation({"text_config": attention, "vision_config": "sdpa"})
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, -n:], torch.stack(out.logits)


def one_row(inputs, row, skip):
    "The inputs of one sequence without its padding."
    each = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    cut = {
        k: x.view(2, -1, *x.shape[1:])[row].view(-1, *x.shape[1:])
        for k, x in inputs.items()
        if k not in each
    }
    cut |= {
        k: x - x.min() for k, x in cut.items() if k.endswith("_token_pooling")
    }  # places among the patches of this row alone
    return cut | {k: inputs[k][row : row + 1, skip:] for k in each if k in inputs}


@pytest.mark.parametrize("name, video", CASES)
def test_pictures(name, video):
    """Attention on codes gives the tokens of attention over the decoded states, with left
    padding and without; with everything in the exact window, those of transformers' own cache.
    The picture counts: another one gives other logits. Coarse codes count: their logits are
    others."""
    model, inputs = made(name), asked(name, video)
    own, exact = answer(model, inputs, "sdpa", DynamicCache(config=model.config))
    _, other = answer(
        model,
        {k: -x if "pixel" in k else x for k, x in inputs.items()},
        "sdpa",
        DynamicCache(config=model.config),
    )
    top = exact.abs().max()
    assert (other - exact).abs().max() > 0.05 * top
    for recipe in (Recipe(Spec(3), Spec(3), sinks=0, recent=400), "k2v2-scalar"):
        cache = TurboQuantCache(model, recipe)
        want, dense = answer(model, inputs, "sdpa", TurboQuantCache(model, recipe))
        got, logits = answer(model, inputs, "turboquant", cache)
        same(got, want)
        assert (logits - dense).abs().max() < 1e-4 * top
        if recipe != "k2v2-scalar":
            same(got, own)
            continue
        assert cache.coded_layers[0].starts == (5, 0)
        for row, skip in ((0, 5), (1, 0)):
            alone, _ = answer(
                model, one_row(inputs, row, skip), "turboquant", TurboQuantCache(model, recipe)
            )
            same(alone[0], got[row])
        wide = Recipe(Spec(2), Spec(2), sinks=0, recent=0)
        coarse = [
            answer(model, inputs, a, TurboQuantCache(model, wide))
            for a in ("sdpa", "turboquant")
        ]
        same(*(tokens for tokens, _ in coarse))
        assert (
            (coarse[0][1] - exact).abs().max()
            > 1e-3 * top
            > 10 * (coarse[0][1] - coarse[1][1]).abs().max()
        )


@pytest.mark.parametrize("name", ("Qwen2_5_VL", "Glm4v"))
def test_positions_that_a_model_keeps_to_itself_travel_with_a_saved_session(name, tmp_path):
    """After an image text does not stand at the number of tokens before it; what it differs by
    is an attribute of the model, and a fresh one does not have it."""
    model, inputs = copy.deepcopy(made(name)), asked(name)
    cache, how = TurboQuantCache(model, "k4v4"), dict(max_new_tokens=3, do_sample=False)
    said = model.generate(**inputs, **how, past_key_values=cache)
    cache.save(tmp_path / "a")
    mask = longer(inputs["attention_mask"], 7)
    turn = dict(input_ids=torch.cat([said, said[:, 5:9]], 1), attention_mask=mask)

    def goes_on(other, cache):
        out = other.generate(
            **turn,
            **how,
            past_key_values=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(out.logits)

    fresh, blind = (copy.deepcopy(made(name)) for _ in range(2))
    for other in (fresh, blind):
        other.model.rope_deltas = None
    back = TurboQuantCache.load(tmp_path / "a", fresh)
    lost = TurboQuantCache.load(tmp_path / "a", blind)
    blind.model.rope_deltas = None  # the mutant
    want = goes_on(model, cache)
    same(goes_on(fresh, back), want)
    assert (goes_on(blind, lost) - want).abs().max() > 1e-3
    with refuses("holds 1 values that a"):
        TurboQuantCache.load(tmp_path / "a", model.config)
