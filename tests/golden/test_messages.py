"No message of an error is lost: each that the package had is still written somewhere in it."

import ast
import json

import pytest

from tests.golden import messages

# Messages that are meant to be gone: of a module, or the message itself, and why.
CAP = "keys with a centre cannot have a soft cap: it would cap scores without their common part"
MEANS = "keys with a centre cannot have a soft cap: leave the calibration's means out"
BUDGET = "a budget takes the place of decay, and chooses codes that can lose planes"
WAITS = "static=True does not serve a QJL residual: its coding waits for the device"
_FRAME = "a frame, which every calibration may have, says it of its parts"
_LEAST = 'cli/app says it for every number that has a least: "{} must be at least {}, got {}"'
_PLAN = "of the target of an encode, which is no object any more"
_WEB = "of the side-by-side page, which is a conversation now"
_INSTALL = "by `checks.missing`, with the repository's address: no index has the package"
_HEAD = "of a GGUF file; its library says so, and cli/app that it is damaged"
_ENDS = "sequences begin somewhere, and end with their store"
_JOIN = "by `blocks.join_piece`, which joins the pieces of a store and of an engine"
GONE: dict[str, str] = {
    "own and past must be [T, Hq, d] alike, their log-sum-exps [T, Hq], got {}, {}, {}, {}": (
        _JOIN
    ),
    "pieces must be contiguous and of one shape, got {}, {} and {}, {}": _JOIN,
    "this package is imported but not installed, so vLLM cannot find its backend: pip install "
    "turboquant-nb": _INSTALL,
    "vLLM is not installed in this environment: pip install 'turboquant-nb[vllm]'": _INSTALL,
    'turboquant web needs gradio: pip install "turboquant-nb[web]"': _INSTALL,
    'turboquant_nb.esm needs transformers 5.17 or newer: pip install "turboquant-nb[hf]"': (
        _INSTALL
    ),
    '{} is needed here and could not be imported ({}): pip install "turboquant-nb[demo]"': (
        _INSTALL
    ),
    'turboquant_nb.hf needs transformers 5.17 or newer: pip install "turboquant-nb[hf]"': (
        _INSTALL
    ),
    "Triton is not installed (pip install 'turboquant-nb[triton]')": _INSTALL,
    "vLLM is not installed: pip install 'turboquant-nb[vllm]'": _INSTALL,
    '{}: pip install "turboquant-nb[entropy]"': _INSTALL,
    "{} has format {}, this version reads {}: {}": "no format of before is read or explained",
    "{}.{} must be {} of shape {}, got {}": "by one name that holds both: key.plane0",
    "/{} needs a file: /{} talk.safetensors": "such files are no safetensors",
    "{}: layer {} decodes to other tensors than were saved": "checksums are of what is written",
    "calibration/fold": "head transforms of the same text lose less, everything coded (91)",
    "--text {}: it is empty": "of a fold; calibrate says that the text gives no window",
    "{} {}: it takes {} bytes, and {} are free there": "of a fold, which wrote a checkpoint",
    "data must be [rows, a multiple of 20 bytes], got {}": "of what its page alone shows",
    "data must be uint8, got {}": "the same",
    "depths must be in [0, 1], lengths at least 64 and trials at least 2": (
        "of eval needle, whose sentences eval long asks for"
    ),
    "the calibration is of another model: it has {}": "of a frame, too: the {} is of another",
    "the file ends inside its head": _HEAD,
    "the file ends inside its head, or is damaged there ({})": _HEAD,
    "expected a GGUF file of version 2 or 3, got {}, version {}": _HEAD,
    "a GGUF value has one of the kinds 0 to 12, got {}": _HEAD,
    "apps/search": "the index is the chapter's own (85), of forty lines",
    "cli/bench": "scripts/bench measures; the command repeated a part of it",
    "kernels/latents": "latents are attended to block by block, which serves every code",
    "kernels/paged": "a third layout of codes, which only its own chapter used",
    MEANS: "scores are whole before the cap, whatever they are computed from",
    CAP: "scores of codes get the query's product with the centre, so a soft cap is served",
    "a mask is not supported, only causal order, ranges and a sliding window": (
        "the kernel's backend says it: ranges of positions, not masks"
    ),
    "layers that read the cache of {}": "vLLM's layers share blocks, so such layers are served",
    "apps/claims": "the audit is a page (chapter 29), not a command",
    # by a code, which says why it does not serve; who asks puts a name before it
    "{}: a QJL residual needs the sketch of the query": "a sentence of `SketchedCode.refuses`",
    "{}: all channels must have equally many bits, got {}": "a sentence of `ScalarCode`",
    "{}: levels must be on their int8 grid (Codebook.to_int8_grid)": "the same",
    "codes must lie in 0..{}, got {}": "by `checks.within`, in the same words",
    # a budget drops planes, of codes that it chooses itself
    "decay drops the last plane of codes; residual 'qjl' keeps signs apart": BUDGET,
    "decay drops the last plane of codes; residual 'qjl' keeps its signs apart": BUDGET,
    "decay needs a side with channels of 3 or 4 bits": BUDGET,
    "decay needs a side with channels of 3 or 4 bits, got at most {}": BUDGET,
    "max_length allocates once, so decay frees nothing; choose one of them": BUDGET,
    "decay changes the codes of old tokens with every step": BUDGET,
    "decay and QJL residuals": BUDGET,
    "tiles that lost a plane (decay) are not supported": BUDGET,
    "a {}-bit code has a single plane; dropping it would leave nothing": "chapter 14 shows it",
    "tokens must lie in [{}, {}), got {} and {} more": "from 0: no tile lost a plane",
    WAITS: "in two parts: what is asked, and the code's reason",
    "{}: a cell holds codes with one number of bits and no sketch, got {}": "with the reason",
    # a code without one look-up table is decoded block by block, whatever it is
    "{}: a QJL residual is served for keys only": "served for both sides, by blocks",
    "{}: channels must be one or two groups of even size, the one with more bits first, got "
    "sizes {}": "any groups are served, by blocks",
    # a cache brings its attention, so steps are captured under any implementation
    "captured steps need the 'turboquant' attention": "by `Reader.obstacle`, with the cure",
    "the model attends by {}, not {}": "the same",
    # options of TurboESM, which is an experiment of its page (page proteins)
    "which tokens are sinks or outliers is read from the device": "said by the store",
    "allocation needs a table per channel, without sign": "TurboESM",
    "one_table needs tables per head on both sides": "TurboESM",
    "sinks must be a non-negative integer, got {}": "TurboESM",
    "with sign, bits must be at least 2, got {}": "TurboESM",
    "head size must be a multiple of 16 up to 256, not {}": "up to 512",
    "{}: head size must be a multiple of 16 up to 256, got {}": "up to 512",
    # an engine serves what it refused
    "{} exact recent tokens are not served beside layers with a sliding window: --recent 0 "
    "turns them off": "they are",
    "beside layers with a sliding window": "the same",
    "{} has {} layers without keys and values of their own: such models are not served": (
        "those layers stay the engine's"
    ),
    "at most {} query heads for a KV head are supported, got {}": "16, of every kernel",
    "learned attention sinks": "they join the softmax",
    "a page of {} numbers has no room for {} recent and {} first tokens of {} heads with {} "
    "numbers each": "by `pages.exact_states`, of a head's part of a page",
    "vLLM must be at least {} and below {}, whose interface this was tested with; got {}": (
        "a newer one is tried, with a warning"
    ),
    "start must have shape [{}], got {}": "said by `files.Saved`, as of any tensor of a file",
    "this model is wrapped already; undo() gives it back": "two may take turns now",
    "coded must hold signs and residual_norm; it comes from prod_encode": "from `SketchedCode`",
    "allocation must be 'model', 'layer' or 'none', got {}": "by `checks.one_of`",
    "{} must be between 0 and 1, got {}": "shares of ESM-2's training, which are constants",
    # targets were put together by hand; a store's own tensors are what its plan takes
    "a pre-RoPE mean of {} needs mean and start, {} positions": _PLAN,
    "a transform of {} must be of {} heads, got {}": _PLAN,
    "planes of {} must have shapes {}, got {}": _PLAN,
    "scale and rotation of {} must fit {}": _PLAN,
    "tensors of {} must be contiguous and on {}": _PLAN,
    "the mean of {} must have shape {}, got {}": _PLAN,
    "encode_append needs Triton: pip install 'turboquant-nb[triton]'": "by `refuses`",
    "k and v must be {}, got {} and {}": "by `clock.check_states`",
    "int8 tensor cores with asynchronous copies need compute capability 8.0": (
        "of every kernel for tensor cores"
    ),
    "{} must be bfloat16, float16 or float32, got {}": "by `clock.check_states`",
    "--threads must be at least 1, got 0": _LEAST,
    "--{} must be positive, got {}": _LEAST,
    "loss and reference must be [n] with one n >= 2, got {}": "by `score.paired`",
    "{} has become something else than a regular file; it was not replaced": "of a race",
    "--offload reads layers from safetensors, and {} is a GGUF file: give a folder or a hub "
    "id": ("by `load_offloaded`"),
    "--text {}: not UTF-8 text (byte {})": "in the words of a prompt's file",
    "--batch must be at least 1, got {}": _LEAST,
    "--apart must be at least 1, got {}": _LEAST,
    "{} must be at least 1, got {}": _LEAST,
    "{} was written with other weights than this model's": "by `check_weights`",
    "--port {}: cannot listen at {} ({})": "by gradio",
    "head must be from 0 to {}, got {}": _WEB,
    "layer must be from 0 to {}, got {}": _WEB,
    "the prompt has {} tokens, with the answer {}; this model reads {}": _WEB,
    "the prompt is empty": _WEB,
    "there is nothing stored yet: ask something first": _WEB,
    "tokens must be from 1 to 1,024, got {}": _WEB,
    # keys are coded in the frame of a model, and values have none
    "not served: {}; turboquant calibrate makes one, --calibration takes it": (
        "serve finds a frame by itself, and says where it could not"
    ),
    "centers must be as many as transforms, got {} and {}": _FRAME,
    "center={} is for keys: RoPE rotates no values; use 'prompt_mean'": (
        "of every centre of values"
    ),
    "the calibration has means alone, and means is False": "a frame has a pair scale, too",
    "the calibration has transforms or means of {} of {} layers; all are needed": _FRAME,
    "{}, whose keys lie far from 0, without a calibration's means, which such codes need: give "
    'a calibration; "means": false serves it all the same': "names the command",
    # of the cold tier, before one safetensors file took its place
    "hf/storage": "nothing is entropy coded",
    "the look-up of four codes cannot serve this call: {}": "`ops` says it of every backend",
    "these tensors are not the state of a single store": "`files.Saved` names what is missing",
    "{} holds a single store, not a cache; read it with KVStore.load": "no such files",
    "only a filled cache whose layers are all coded can be saved": "others can be saved, too",
    "tokens were cropped lately": "or rows moved",
    "sequences have ends": _ENDS,
    "a static store has no ends: a captured step would not see them": _ENDS,
    "sequences have ends; set_range(end=None) clears them before an append": _ENDS,
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


@pytest.fixture(scope="module")
def modules():
    "(name, tree) of every module of the package."
    return [*messages.modules()]


def test_every_message_is_still_there(modules):
    now = {text for _, tree in modules for text in messages.strings(tree)}
    assert lost(recorded(), now) == []


def test_what_is_gone_is_gone_and_was_there(modules):
    before = recorded()
    known = {*before, *(text for texts in before.values() for text in texts)}
    assert GONE.keys() <= known and all(GONE.values())
    assert not GONE.keys() & {name for name, _ in modules}


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
