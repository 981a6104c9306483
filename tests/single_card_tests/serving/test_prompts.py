"""Prompts of the server's clients.

Guarantees: images and videos are those of the processor; files and addresses are opened where it is
allowed, and refusals name no folder of this machine; what has no room is not decoded; placeholders
are no text.
"""

import json
from copy import copy

import numpy as np
import pytest

from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.serving.openai_protocol import ApiError
from paddle_vl.serving.prompts import MediaRules, Prompts
from tests.support.openai_server import asked, png, template_processor, uri


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return template_processor(tmp_path_factory.mktemp("processor"))


@pytest.mark.parametrize("kind", ["uri", "path", "file uri"])
def test_images_are_those_of_the_processor(processor, tmp_path, kind):
    (tmp_path / "a b.png").write_bytes(png())
    source = {
        "uri": uri(png()), "path": "a b.png", "file uri": f"file://{tmp_path}/a%20b.png",
    }[kind]  # fmt: skip
    found = Prompts(processor, 448, 1000, MediaRules(tmp_path)).of_chat(asked(source), [], {})
    wanted = processor(messages=[{"role": "user", "content": "<image>What?"}],
                       images=[png()])  # fmt: skip
    assert found.ids.tolist() == wanted["input_ids"][0].tolist()
    assert sorted(found.visual) == ["image_grid_thw", "pixel_values"]
    np.testing.assert_array_equal(found.visual["pixel_values"], wanted["pixel_values"])


def test_a_video_is_read_from_its_uri(processor, tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    prompts = Prompts(processor, 448, 1000, MediaRules())
    found = prompts.of_chat(asked(uri((tmp_path / "a.mp4").read_bytes()), "video"), [], {})
    wanted = processor(messages=[{"role": "user", "content": "<video>What?"}],
                       videos=[str(tmp_path / "a.mp4")])  # fmt: skip
    assert found.ids.tolist() == wanted["input_ids"][0].tolist()
    assert sorted(found.visual) == ["pixel_values_videos", "video_grid_thw"]


def test_a_list_of_pictures_is_a_video_of_all_of_them(processor):
    own = copy(processor)
    own.video_processor = processor.video_processor.replaced(fps=1.0)
    found = Prompts(own, 448, 1000, MediaRules()).of_chat(
        [{"role": "user", "content": [{"type": "video", "video": [uri(png())] * 10}]}], [], {}
    )
    assert found.visual["video_grid_thw"][:, 0].tolist() == [5]


@pytest.mark.parametrize(
    ("source", "kind", "has_folder", "text"),
    [
        ("http://127.0.0.1:1/a.png", "image", None, "not public"),
        (uri(b"no image"), "image", True, "cannot be decoded as an image"),
        (uri(b"no video"), "video", True, "cannot be decoded as a video"),
        ("data:image/png,abc", "image", True, "cannot be used"),
        ("a.png", "image", False, "--allowed-media-path"),
        ("file:///etc/passwd", "image", False, "--allowed-media-path"),
        ("file:///etc/passwd", "image", True, "is not in the server's folder"),
        ("../a.png", "image", True, "is not in the server's folder"),
        ("link.png", "image", True, "is not in the server's folder"),
        ("https://example.com/a.png", "image", True, "--allow-remote"),
        ("", "image", True, ""),
        ("bad.png", "image", True, "(bad.png): the file cannot be decoded as an image"),
        ("bad.mp4", "video", True, "(bad.mp4): the file cannot be decoded as a video"),
        ("no.png", "image", True, "there is no file no.png"),
        (".", "image", True, "there is no file the server's folder"),
    ],
)
def test_files_and_addresses_are_opened_where_it_is_allowed(
    processor, tmp_path, source, kind, has_folder, text
):
    (tmp_path / "link.png").symlink_to("/etc/passwd")
    for name in ("bad.png", "bad.mp4"):
        (tmp_path / name).write_bytes(b"no picture")
    rules = MediaRules(tmp_path if has_folder else None, allow_remote=has_folder is None)
    prompts = Prompts(processor, 448, 1000, rules)
    with pytest.raises(ApiError) as caught:
        prompts.of_chat(asked(source, kind), [], {})
    assert caught.value.status == 400
    assert text in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert not any(each in caught.value.message for each in ("/paddle-vl-", "0x"))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('no ' ~ messages[0].role) }}", "the chat template does not take the"),
        ("{{ messages[0].role }}", "the chat template prints nothing of 'What?'"),
        ("{{ messages[0].content }}{{ 'x' * 200000 }}", "the chat template makes 2000"),
    ],
)
def test_refusals_by_a_template_name_no_folder(processor, tmp_path, template, text):
    processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    prompts = Prompts(VLProcessor.from_pretrained(tmp_path), 448, 1000, MediaRules())
    with pytest.raises(ApiError) as caught:
        prompts.of_chat([{"role": "user", "content": "What?"}], [], {})
    assert caught.value.message.startswith(text)
    assert str(tmp_path) not in caught.value.message


def test_nulls_of_calls_and_tools_are_rendered(processor, tmp_path):
    """As by transformers 5.24; those of data may be of a table, which fills them in."""
    processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>"
        "{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    own = VLProcessor.from_pretrained(tmp_path)
    city = {"type": "string", "default": None}
    call = {"name": "f", "arguments": {"city": None}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"city": city}}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "c"},
    ]
    wanted = f"{json.dumps(tools)}a<|im_end|>b<|im_end|>{json.dumps(call)}c<|im_end|>"
    assert own.apply_chat_template(messages, tools=tools) == wanted
    prompt = Prompts(own, 448, 1000, MediaRules()).of_chat(messages, tools, {})
    assert own.decode(prompt.ids, False) == wanted


def test_long_prompts_are_not_decoded_and_placeholders_are_no_texts(processor, monkeypatch):
    prompts, large = Prompts(processor, 448, 10, MediaRules()), asked(uri(png(256)))
    for prompt in ("<|image_pad|>", [448], [-1], ""):
        with pytest.raises(ApiError, match="prompt: "):
            prompts.of_text(prompt)
    monkeypatch.setattr("paddle_vl.data.media_file.Image.Image.load", None)
    with pytest.raises(ApiError, match="maximum context length is 10 tokens"):
        prompts.of_chat(large, [], {})
