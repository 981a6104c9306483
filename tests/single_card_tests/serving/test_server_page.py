"""The page at `/` of the server, in Chromium, before scripted answers.

Guarantees: the page needs no token, asks nobody else and has a policy that says so; pictures come
by choice, drop and camera, and large ones are made smaller; answers are shown as they come, as
text, with boxes where `paddle_vl.data.formats.grounding` reads them; Stop and Escape end a request;
refusals are shown with their reason, and a token is asked for; all works by keys alone, and on a
narrow phone.
"""

import base64
import json
import re
import time
import urllib.request
from hashlib import sha256
from pathlib import Path

import httpx2
import pytest
from PIL import Image

from paddle_vl.data.formats.grounding import boxes_in
from paddle_vl.serving.engine import Event
from tests.support.browser import BROWSER, browser
from tests.support.openai_server import WAIT_S, scripted, serving, template_processor

ROOT = Path(__file__).parents[3]
DESKTOP, PHONE = (1200, 800), (360, 740)
BOX = (0xD4, 0x14, 0x5A)
ENDED = "running === null && document.querySelector('.retry')"
ANSWERS = [
    '```json\n[{"bbox_2d": [100, 200, 500, 800], "label": "door"}, {"point_2d": [5, 6.5]}]\n```',
    '{"bbox_2d": [500, 800, 100, 200]}',
    '[{"bbox_2d": [1, 2, 3]}]',
    '{"digit": 3}',
    "[[1, 2, 3, 4], [5, 6]]",
    "The door is at [100, 200, 500,800], and (1,2),(3,4) is the sill; (7, 8) is nothing.",
    '```json\n[{"bbox_2d": [100, 200, 500, 800], "label": "do',
    "None.",
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("needs Chromium (Debian: chromium-headless-shell)")
    flags = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with browser(tmp_path_factory.mktemp("profile"), *flags) as tab:
        yield tab


@pytest.fixture
def served(tmp_path):
    return scripted(template_processor(tmp_path / "processor"), "It is 3.")


@pytest.fixture
def page(tab, served):
    """The page for a desktop, which has no complaints."""
    with serving(served) as address:
        tab.open(f"{address}/", *DESKTOP)
        tab.wait("byId('model').options.length")
        yield tab
        assert tab.problems == []
        assert tab.run("document.scrollingElement.scrollHeight") == DESKTOP[1]


def drawn(path: Path, width: int = 200, height: int = 100) -> Path:
    Image.new("RGB", (width, height), "white").save(path)
    return path


def sent(tab, place: int) -> tuple:
    """The format and size of a picture of the next message."""
    with urllib.request.urlopen(tab.run(f"draft[{place}].url")) as data:
        picture = Image.open(data)
    return picture.format, picture.size


def asked(tab, served, text: str):
    """Write and send a message, and wait for the engine's handle of it."""
    num_before, end = len(served.engine.handles), time.monotonic() + WAIT_S
    tab.run("question.focus()")
    tab.type(text)
    tab.press("Enter")
    while len(served.engine.handles) == num_before:
        assert time.monotonic() < end
        time.sleep(0.01)
    return served.engine.handles[-1]


def test_the_page_is_one_file_with_a_policy(served):
    with serving(served, token="secret") as address:
        assert httpx2.post(f"{address}/").status_code == 405
        answer = httpx2.get(f"{address}/")
    policy, text = answer.headers["content-security-policy"], answer.text
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'; " in policy
    for tag in ("style", "script"):
        (content,) = (each.split(f"</{tag}>")[0] for each in text.split(f"<{tag}>")[1:])
        digest = base64.b64encode(sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'; " in policy
    assert not re.search("https?:|innerHTML", text)
    assert '"paddle_vl.serving" = ["page.html"]' in (ROOT / "pyproject.toml").read_text()


def test_a_conversation_about_a_picture(page, served, tmp_path):
    for name, value in (("temperature", "0.5"), ("seed", "7"), ("system", "Be brief.")):
        page.run(f"settings.elements.{name}.value = {value!r}")
    page.run("byId('model').value = 'doors'; settings.dispatchEvent(new Event('change'))")
    page.choose("#file", [drawn(tmp_path / "a.png")])
    page.wait("draft.length")
    served.engine.answers[:] = ["wait", "It is 3."]
    handle = asked(page, served, "What is it?")
    ids = served.prompts.processor.tokenizer.encode("<think>\na b\n</think>\n\n<b>one</b>")
    for token_id in ids[:-1]:
        handle.put(Event(token_id, None))
    page.wait("document.querySelector('.answer > .text').textContent.startsWith('<b>one')")
    assert page.run("running !== null && byId('send').hidden && !byId('stop').hidden")
    handle.put(Event(ids[-1], None))
    handle.put(Event(served.end_ids[0], None, (), "stop"))
    page.wait(ENDED)
    assert page.text(".answer > .text") == "<b>one</b>"
    assert page.text("#status") == "Answer: <b>one</b>"
    assert page.text(".answer details:not([open])") == "Reasoninga b"
    assert "tokens asked" in page.text(".answer .note")
    sampling, adapter = handle.request.sampling, handle.request.adapter
    assert (sampling.temperature, sampling.seed, adapter) == (0.5, 7, "doors")
    assert handle.request.visual
    asked(page, served, "Sure?")
    page.wait(f"{ENDED} && turns[1].answer")
    messages = page.run("requestOf(turns[1]).messages")
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "<b>one</b>"
    page.run("document.querySelector('.retry').click()")
    page.wait(f"{ENDED} && turns[1].answer")
    assert len(served.engine.handles) == 3
    page.open(page.run("location.href"), *DESKTOP)
    page.wait("byId('model').value === 'doors'")
    assert page.run("settings.elements.seed.value") == "7"


def test_dropped_pictures_are_made_smaller_and_taken_back(page, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("words")
    page.drop([drawn(tmp_path / "wide.png", 4096, 64), drawn(tmp_path / "b.png"), text])
    page.wait("draft.length === 2 && byId('complaint').textContent")
    assert page.text("#complaint").startswith("notes.txt is no picture")
    assert "wide.png, 4096 x 64, sent as 2048 x 32, " in page.run("draft[0].note")
    assert sent(page, 0) == ("JPEG", (2048, 32))
    assert sent(page, 1) == ("PNG", (200, 100))
    page.run("document.querySelector('#draft button').focus()")
    for num_left in (1, 0):
        page.press("Enter")
        assert page.run("draft.length") == num_left
    assert page.run("document.activeElement.id") == "choose"


def test_the_camera_gives_a_picture(page):
    page.run("byId('photo').focus()")
    page.press("Enter")
    page.wait("document.activeElement.id === 'shoot'")
    page.press("Enter")
    page.wait("draft.length === 1 && !camera.open")
    assert sent(page, 0) == ("JPEG", (1920, 1080))
    assert page.run("camera.querySelector('video').srcObject") is None


def test_boxes_are_drawn_at_their_pixels(page, served, tmp_path):
    for answer, boxes in zip(ANSWERS, page.run(f"{json.dumps(ANSWERS)}.map(boxesIn)"), strict=True):
        found = [(tuple(box["corners"]), box.get("label")) for box in boxes]
        assert found == boxes_in(answer)
    served.engine.answers[:] = [ANSWERS[0]]
    page.drop([drawn(tmp_path / "a.png"), drawn(tmp_path / "b.png")])
    page.wait("draft.length === 2")
    asked(page, served, "Where?")
    page.wait(f"{ENDED} && document.querySelector('.seen img').complete")
    assert page.text("figure ol") == "door: x 20 to 100, y 20 to 80unnamed: x 1, y 1"
    image = "document.querySelector('.seen img').getBoundingClientRect()"
    x, y, width = (page.run(f"{image}.{side}") for side in ("x", "y", "width"))
    assert width == 200
    seen = page.picture()
    left, right, top, bottom = x + 20, x + 100, y + 20, y + 80
    for at in ((left + 1, y + 50), (right - 1, y + 50), (x + 90, top + 1), (x + 50, bottom - 1)):
        assert seen.getpixel(at) == BOX, at
    for at in ((left - 4, y + 50), (right + 3, y + 50), (x + 50, bottom + 3)):
        assert seen.getpixel(at) == (255, 255, 255), at
    page.run("document.querySelector('figure select').focus()")
    page.press("ArrowDown")
    page.wait("document.querySelector('.seen img').alt === 'b.png with marks'")
    assert page.run("document.querySelectorAll('.seen .box').length") == 1


@pytest.mark.parametrize("way", ["Escape", "stop", "new"])
def test_an_answer_is_stopped(page, served, way):
    served.engine.answers[:] = ["wait"]
    handle = asked(page, served, "What?")
    page.press("Escape") if way == "Escape" else page.run(f"byId('{way}').click()")
    page.wait("running === null")
    assert handle.is_cancelled.wait(WAIT_S)
    assert page.run("document.activeElement.id") == "question"
    if way == "new":
        assert page.run("[turns.length, byId('turns').children.length]") == [0, 0]
        return
    page.wait("document.querySelector('.answer .note').textContent === 'stopped'")
    asked(page, served, "And now?")
    # What has no answer is no part of the conversation.
    assert page.run("requestOf(turns[1]).messages.length") == 1
    page.press("Escape")
    page.wait("running === null")


def test_refusals_are_shown_where_they_belong(tab, served):
    served.engine.most = 0
    with serving(served, token="secret") as address:
        tab.open(f"{address}/", *DESKTOP)
        for given, reason in (("wrong", ""), ("secret", "401: Incorrect API key")):
            tab.wait(f"access.open && access.innerText.includes({reason!r})")
            tab.type(given)
            tab.press("Enter")
        tab.wait("byId('model').options.length === 3 && !access.open")
        tab.run("question.value = 'What?'; send()")
        error = "document.querySelector('.answer .error')"
        tab.wait(error)
        assert tab.text(".answer .error") == "429: too many tokens wait. Try again in 3 s."
        served.engine.most = 9
        tab.run("sessionStorage.setItem(TOKEN, 'old'); document.querySelector('.retry').click()")
        tab.wait("access.open")
        tab.type("secret")
        tab.press("Enter")
        tab.wait(f"{ENDED} && turns[0].answer === 'It is 3.' && !{error}")
        served.engine.answers[:] = [RuntimeError("a defect")]
        asked(tab, served, "Again?")
        tab.wait(error)
        assert tab.text(".answer .error").startswith("the model failed")


def test_keys_alone_are_enough(page, served):
    controls = "[...document.querySelectorAll('button, input, textarea, select, summary')]"
    controls += ".filter((one) => one.checkVisibility())"
    reached, num_controls = set(), page.run(f"{controls}.length")
    # The conversation, and the browser's own bar, are places too.
    for _ in range(num_controls + 2):
        page.press("Tab")
        reached.add(page.run(f"{controls}.indexOf(document.activeElement)"))
        outline = "getComputedStyle(document.activeElement).outlineStyle === 'solid'"
        assert page.run(f"document.activeElement === document.body || {outline}")
    assert reached - {-1} == set(range(num_controls))
    fields = "[...document.querySelectorAll('input, textarea, select')]"
    assert page.run(f"{fields}.every((one) => one.labels.length || one.ariaLabel)")
    page.run("question.focus()")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    page.press("Enter")
    page.wait(ENDED)
    assert page.run("[turns[0].text, document.activeElement.id]") == ["one\ntwo", "question"]
    page.press("Tab", shift=True)
    page.press(" ")
    page.wait(f"{ENDED} && turns[0].answer")
    assert len(served.engine.handles) == 2


@pytest.mark.parametrize("is_open", ["false", "true"])
def test_a_narrow_phone_shows_everything(tab, served, tmp_path, is_open):
    served.engine.answers[:] = [ANSWERS[0] + "long" * 60]
    picture = drawn(tmp_path / f"{'name' * 20}.png")
    with serving(served) as address:
        tab.open(f"{address}/", *PHONE, is_phone=True)
        tab.choose("#file", [picture])
        tab.wait("draft.length && byId('model').options.length")
        asked(tab, served, "Where?")
        tab.wait(ENDED)
        tab.choose("#file", [picture])
        tab.wait("draft.length")
        tab.run(f"byId('fold').open = {is_open}")
        assert tab.run("[innerWidth, document.scrollingElement.scrollWidth]") == [360, 360]
        assert tab.run("talk.scrollWidth <= talk.clientWidth && talk.clientHeight > 100")
        places = "[...document.querySelectorAll('button, textarea, select, .seen')]"
        places += (
            ".filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect())"
        )
        assert tab.run(f"{places}.every(({{left, right}}) => 0 <= left && right <= 360)")
        assert tab.run("byId('send').getBoundingClientRect().bottom") <= PHONE[1]
