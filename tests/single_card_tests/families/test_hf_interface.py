"""What users of HF transformers expect of a model: HF's arguments are accepted where they ask for
nothing or mean the same, and otherwise refused by name with what to do instead."""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl import PI07LowLevelPolicy, Qwen3VLForConditionalGeneration
from paddle_vl.testing.qwen3_vl import token_rows
from tests.single_card_tests.families.pi07.test_policy import golden_policy
from tests.support.pi07_golden import character_tokenizer
from tests.support.tiny import tiny_model

IDS = token_rows([1, 2, 3], [7, 8, 9])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def test_outputs_are_indexed_as_hfs(model):
    without = model(input_ids=IDS)
    assert without[0] is without["logits"] is without.logits
    assert "loss" not in without
    output = model(input_ids=IDS, labels=IDS)
    loss, logits = output[:2]
    assert loss is output.loss is output["loss"] is output.to_tuple()[0]
    assert logits is output[1] is dict(output)["logits"]
    with pytest.raises(KeyError, match="attentions: the output has loss, logits"):
        output["attentions"]


def test_a_model_tells_its_dtype_and_size(model, folder):
    sizes = [int(np.prod(parameter.shape)) for parameter in model.parameters()]
    assert (model.dtype, model.num_parameters()) == (paddle.float32, sum(sizes))
    half = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype="bfloat16")
    half.parameters()[0].stop_gradient = True
    assert half.dtype == paddle.bfloat16
    assert half.num_parameters(only_trainable=True) == sum(sizes[1:])


def test_a_policy_tells_them_too_and_takes_hfs_names(tmp_path):
    policy = golden_policy()
    sizes = [int(np.prod(parameter.shape)) for parameter in policy.parameters()]
    assert (policy.dtype, policy.num_parameters()) == (paddle.float32, sum(sizes))
    policy.tokenizer, policy.action_tokenizer = character_tokenizer(), None
    policy.save_pretrained(tmp_path)
    load = PI07LowLevelPolicy.from_pretrained
    assert load(tmp_path, torch_dtype="bfloat16", device_map="cpu").dtype == paddle.bfloat16
    assert load(tmp_path, dtype="auto").dtype == paddle.float32
    with pytest.raises(ValueError, match="is a local path, which has no revision 'main'"):
        load(tmp_path, revision="main")


def test_lists_are_inputs(model):
    ids, mask = [[5, 1, 2], [7, 8, 9]], [[0, 1, 1], [1, 1, 1]]
    arrays = {"input_ids": np.array(ids), "attention_mask": np.array(mask)}
    wanted = model(**arrays, labels=np.array(ids)).loss
    assert float(model(ids, mask, labels=ids).loss) == float(wanted)
    wanted = model.generate(**arrays, max_new_tokens=3)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], r"the shape \[2\]; \[B, L\] is needed: put a single row into a list"),
        ([[1, 2, 3], [4]], "rows of 1 to 3 tokens: pad them on the left"),
        ([[1.5]], "values of float64; integers are needed"),
    ],
)
def test_lists_that_are_no_batch_are_refused(model, ids, message):
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=message):
            call(ids)


KEPT, CURRENT = r"generate\(\) and stream\(\) keep", r"call paddle\.set_device\(\)"
REFUSED = {
    "the model has no ": [
        ({"past_key_values": [1]}, KEPT),
        ({"use_cache": True}, KEPT),
        ({"output_attentions": True}, "attention keeps no weights"),
        ({"output_hidden_states": True}, "forward post hook"),
        ({"inputs_embeds": np.zeros((2, 2))}, "give input_ids"),
        ({"return_dict": False}, r"output\.to_tuple\(\)"),
    ],
    "generation has no ": [
        ({"past_key_values": np.zeros(3)}, "give the whole prompt"),
        ({"output_attentions": True}, "attention keeps no weights"),
        ({"output_scores": True}, "on_logits= is called"),
        ({"max_length": 20}, "give max_new_tokens"),
        ({"num_beams": 4}, "not supported"),
        ({"stopping_criteria": [1]}, "eos_token_id"),
    ],
    "": [
        ({"device_map": "cuda:3"}, f"current device, cpu: {CURRENT}"),
        ({"device_map": {"": 0}}, CURRENT),
        ({"attn_implementation": "flash_attention_2"}, "kernels follow from device and dtype"),
        ({"trust_remote_code": True}, "no code of a folder is run"),
        ({"load_in_4bit": True}, "weights are loaded in a floating"),
        ({"cache_dir": "x"}, "the hub's environment variables"),
    ],
}


@pytest.mark.parametrize(
    ("who", "argument", "remedy"), [(who, *row) for who, rows in REFUSED.items() for row in rows]
)
def test_what_a_call_generation_or_loading_lacks_is_refused_by_name(
    model, folder, who, argument, remedy
):
    load = partial(Qwen3VLForConditionalGeneration.from_pretrained, folder)
    calls = {"": load, "the model has no ": partial(model, IDS)}
    with pytest.raises(ValueError, match=f"{who}{next(iter(argument))}.*{remedy}"):
        calls.get(who, partial(model.generate, IDS))(**argument)


def test_what_asks_for_nothing_is_accepted(model):
    neutral = {"use_cache": False, "output_attentions": None, "return_dict": True}
    assert model(input_ids=IDS, **neutral).logits.shape == [2, 3, 64]
    with pytest.raises(TypeError, match="the model has no argument colour"):
        model(input_ids=IDS, colour=1)
    wanted = model.generate(IDS, max_new_tokens=3).tolist()
    neutral = {"use_cache": True, "num_beams": 1, "do_sample": False, "return_dict_in_generate": 0}
    neutral |= {"temperature": None, "top_k": None, "stopping_criteria": None}
    assert model.generate(IDS, max_new_tokens=3, **neutral).tolist() == wanted


class TorchsDtype:
    """Has the text of torch's dtype."""

    def __repr__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": TorchsDtype(), "device_map": "cpu"}, "bfloat16"),
        ({"dtype": "auto", "device_map": "auto", "attn_implementation": "sdpa"}, "float32"),
        ({"low_cpu_mem_usage": True, "trust_remote_code": False}, "float32"),
    ],
)
def test_loading_honours_what_means_the_same(folder, arguments, dtype):
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, **arguments)
    assert model.dtype == getattr(paddle, dtype)


def test_what_is_neither_folder_nor_name_is_refused():
    with pytest.raises(RuntimeError, match="'runs/here/no' is neither a path here"):
        Qwen3VLForConditionalGeneration.from_pretrained("runs/here/no")


def test_a_streamer_gets_the_prompts_and_then_every_step(model):
    class Streamer:
        values, ends = [], 0

        def put(self, value):
            self.values.append(value)

        def end(self):
            self.ends += 1

    streamer = Streamer()
    found = model.generate(IDS.tolist(), max_new_tokens=3, streamer=streamer)
    prompts, *steps = streamer.values
    assert prompts.tolist() == IDS.tolist()
    assert np.stack(steps, axis=1).tolist() == found.tolist()
    assert streamer.ends == 1
    with pytest.raises(ValueError, match=r"generation has no streamer .*generate\(\) takes it"):
        model.stream(IDS, streamer=streamer)
