"""Models and data sets by their names on hubs.

Only needed files are fetched, once, with the requests of the hubs' own clients.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paddle_vl.files import huggingface
from paddle_vl.files.aistudio import AIStudio
from paddle_vl.files.hub import local_folder, path_or_download
from paddle_vl.files.hub_names import HubName, hub_name, origins
from paddle_vl.files.modelscope import ModelScope
from tests.support.hub_server import COMMIT, HubServer, local_hub

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/hub/requests.json").read_text())
HF, MS = "huggingface", "modelscope"
hub = pytest.fixture(local_hub)
PLAIN = ["ms://org/tiny", "aistudio://org/tiny"]
HUBS = pytest.mark.parametrize("name", ["hf://org/tiny", *PLAIN])
PLAIN_HUBS = pytest.mark.parametrize("name", PLAIN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/a", (HF, "model", "org/a")),
        ("org/a-1.5@v1.0", (HF, "model", "org/a-1.5", "v1.0")),
        ("HF::org/a@refs/pr/1", (HF, "model", "org/a", "refs/pr/1")),
        ("hf://datasets/org/a", (HF, "dataset", "org/a")),
        ("ms::org/a", (MS, "model", "org/a")),
        ("aistudio://org/a", ("aistudio", "model", "org/a")),
        *((path, None) for path in ("a", "./a/b", "/a/b", "a/b/c", "../a", "a/..", "~/a", "")),
    ],
)  # fmt: skip
def test_a_text_is_a_name_or_a_path(text, expected, monkeypatch):
    monkeypatch.delenv("PADDLE_VL_HUB", raising=False)
    assert hub_name(text) == (None if expected is None else HubName(*expected))


def test_what_lies_here_is_a_path_and_a_prefix_asks_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/here").mkdir(parents=True)
    assert local_folder("org/here") == Path("org/here")
    # The folder `org` is there, so this is a mistyped path.
    assert path_or_download("org/her") == Path("org/her")
    with pytest.raises(RuntimeError, match=r"'org/her' is neither a path here .* write org/name"):
        local_folder("org/her")
    assert hub_name("hf://org/here") is not None
    with pytest.raises(ValueError, match="local path, which has no revision 'v1'"):
        local_folder("org/here", revision="v1")


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("hf://org", {}, "'hf://org' names nothing on huggingface: write hf://org/name"),
        ("hf://org/../a", {}, "names nothing on huggingface"),
        ("org/a", {"hub": "github"}, "hub is 'github': use one of huggingface, modelscope"),
        ("ms://org/a", {"hub": HF}, "'ms://org/a' names nothing on huggingface"),
        ("org/a@v1", {"revision": "v2"}, "org/a@v1 has a revision, and 'v2' is given"),
        ("org/a", {"revision": "../x"}, "'../x' is no revision"),
    ],
)
def test_contradictions_in_a_name_are_refused(text, arguments, told):
    with pytest.raises(ValueError, match=told):
        hub_name(text, **arguments)


def test_a_variable_chooses_the_hub_of_names_without_a_prefix(monkeypatch):
    monkeypatch.setenv("PADDLE_VL_HUB", MS)
    assert [hub_name("org/a").hub, hub_name("hf://org/a").hub] == [MS, HF]
    assert hub_name("org/a", hub=HF).hub == HF
    monkeypatch.setenv("PADDLE_VL_HUB", "elsewhere")
    with pytest.raises(ValueError, match="PADDLE_VL_HUB is 'elsewhere': use one of"):
        hub_name("org/a")


def recorded(client: str, story: str, without: str) -> list[str]:
    found = [f"{method} {path}" for method, path, _ in GOLDEN[client][story]]
    return sorted(each for each in found if without not in each)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def needed(hub: HubServer) -> dict[str, bytes]:
    return {name: data for name, data in hub.files.items() if name.endswith(("json", "tensors"))}


@pytest.mark.parametrize(
    ("name", "client", "place", "without"),
    [
        ("org/tiny", HF, f"hf/models--org--tiny/snapshots/{COMMIT}", "sub/notes.txt"),
        ("ms://org/tiny", MS, "ms/models/org--tiny/snapshots/master", "internalAcceleration"),
    ],
)
def test_needed_files_are_fetched_as_the_hubs_own_client_does(
    hub, name, client, place, without, tmp_path
):
    if client == MS:
        hub.files["configuration.json"] = hub.files.pop("tokenizer.json")
    folder = local_folder(name)
    assert (folder, content(folder)) == (tmp_path / place, needed(hub))
    # The redirect of a large file of ModelScope keeps its path.
    assert sorted(set(hub.requests)) == recorded(client, "snapshot", without)
    hub.requests.clear()
    assert local_folder(name) == folder
    (again,) = hub.requests
    assert again in (recorded(HF, "snapshot_again", "-") + recorded(MS, "snapshot", "FilePath"))


def test_a_model_of_aistudio_is_listed_in_pages_and_fetched_once(hub, tmp_path, monkeypatch):
    hub.per_page = 2
    hub.files["additional_chat_templates/a b.jinja"] = b"{{ x }}"
    monkeypatch.setenv("PADDLE_VL_HUB", "aistudio")
    folder = local_folder("org/tiny")
    assert folder == tmp_path / "ais/models/org--tiny/snapshots/master"
    found = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    templates = {name: data for name, data in hub.files.items() if name.endswith("jinja")}
    assert found == needed(hub) | templates
    api = "GET /api/v1/repos/org/tiny"
    pages = [f"{api}/git/trees/master?recursive=true&page={n}&per_page=1000" for n in (1, 2, 3, 4)]
    assert hub.requests[:4] == pages
    in_one = "additional_chat_templates%2Fa%20b.jinja"
    assert {f"{api}/contents/{in_one}", f"{api}/media/{in_one}"} <= set(hub.requests)
    assert not any("modeling.py" in each or "model.bin" in each for each in hub.requests)
    hub.requests.clear()
    assert local_folder("org/tiny") == folder
    assert hub.requests == pages


@pytest.mark.parametrize(
    ("revision", "tree"), [("v1.0", COMMIT), ("a/branch", "a%2Fbranch")], ids=["tag", "branch"]
)
def test_a_revision_of_aistudio_is_a_tag_or_another(hub, revision, tree):
    folder = local_folder(f"aistudio://org/tiny@{revision}")
    assert content(folder) == needed(hub)
    assert any(f"/git/trees/{tree}?" in each for each in hub.requests)
    ref = "?ref=" + revision.replace("/", "%2F")
    of_files = [each for each in hub.requests if "/contents/" in each or "/media/" in each]
    assert len(of_files) >= 6
    assert all(each.endswith(ref) for each in of_files)


@HUBS
def test_code_and_pickles_are_never_fetched(hub, name):
    assert content(local_folder(name, patterns=["*"])) == needed(hub)


def test_of_a_data_set_all_is_fetched_but_code(hub, tmp_path):
    folder = local_folder("org/tiny", kind="dataset")
    assert folder == tmp_path / f"hf/datasets--org--tiny/snapshots/{COMMIT}"
    assert content(folder) == needed(hub) | {"model.bin": hub.files["model.bin"]}


@HUBS
def test_offline_a_complete_folder_needs_no_request_and_another_is_refused(hub, name, monkeypatch):
    folder = local_folder(name, patterns=["*.json"])
    monkeypatch.setenv("PADDLE_VL_OFFLINE", "1")
    hub.sent.clear()
    assert local_folder(name, patterns=["*.json"]) == folder
    for absent, patterns in ((name, None), (name.replace("tiny", "other"), ["*.json"])):
        with pytest.raises(RuntimeError, match=r"in the cache.* requests are turned off: download"):
            local_folder(absent, patterns=patterns)
    assert hub.sent == []


@HUBS
def test_a_broken_download_goes_on_by_itself(hub, name):
    hub.breaks = 1
    # Sizes of pointers are not those of files.
    hub.states_pointers = True
    assert content(local_folder(name)) == needed(hub)


@pytest.mark.parametrize("has_ranges", [True, False])
@PLAIN_HUBS
def test_a_later_download_goes_on_where_one_broke_off(hub, name, has_ranges, tmp_path):
    hub.breaks, hub.has_ranges = 20, False
    with pytest.raises(RuntimeError, match=r"safetensors of model org/tiny.* ends at byte 524288"):
        local_folder(name, patterns=["*.safetensors"])
    assert not [*tmp_path.rglob("*.safetensors")]
    hub.breaks, hub.has_ranges = 0, has_ranges
    hub.sent.clear()
    assert content(local_folder(name)) == needed(hub)
    assert {each["Range"] for each in hub.sent if "Range" in each} == {"bytes=524288-"}


@PLAIN_HUBS
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_with_another_hash_is_not_kept(hub, name, file, tmp_path):
    hub.damages = True
    with pytest.raises(
        RuntimeError, match=r"has not the (SHA-256 \w{64}|Git hash \w{40}) of the listing"
    ):
        local_folder(name, patterns=[file])
    assert not [each for each in tmp_path.rglob("*/models/*") if each.is_file()]
    assert not [*tmp_path.rglob("parts/*")]
    hub.damages = False
    assert content(local_folder(name, patterns=[file])) == {file: hub.files[file]}


@PLAIN_HUBS
def test_a_branch_that_has_moved_replaces_and_removes_files(hub, name):
    folder = local_folder(name)
    kept = (folder / "model.safetensors").stat().st_ino
    # Of the same size.
    hub.files["config.json"] = hub.files["config.json"].replace(b"qwen3", b"qwen4")
    del hub.files["tokenizer.json"]
    local_folder(name, patterns=["*.safetensors"])
    assert content(local_folder(name)) == needed(hub)
    assert (folder / "model.safetensors").stat().st_ino == kept


@HUBS
def test_a_token_goes_to_the_hub_and_not_to_the_host_of_large_files(hub, name, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    monkeypatch.setenv("AISTUDIO_ACCESS_TOKEN", "secret")
    local_folder(name)
    with_token = {headers["Host"] for headers in hub.sent if "secret" in str(headers)}
    assert with_token == {hub.address.removeprefix("http://")}
    assert {headers["Host"] for headers in hub.sent} > with_token
    # Redirects within the hub keep it.
    assert all(("secret" in str(each)) is (each["Host"] in with_token) for each in hub.sent)


@HUBS
def test_those_who_ask_at_once_download_once(hub, name):
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(local_folder, [name] * 4))) == 1
    of_config = [each for each in hub.requests if each[:3] == "GET" and "config.json" in each]
    assert len([each for each in of_config if "/contents/" not in each]) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("org/none", "model org/none on huggingface: there is none of that name, or it is private"),
        ("org/gated", "org/gated .*access is restricted: .* set HF_TOKEN"),
        ("org/tiny@no-such", "org/tiny@no-such on huggingface: there is no such revision"),
        ("ms://org/none", "model org/none on modelscope: there is no such model or revision"),
        ("ms://org/gated", "access is restricted: .* set MODELSCOPE_API_TOKEN"),
        ("ms://org/tiny@no-such", "org/tiny@no-such .* there is no such model or revision"),
        ("ms://datasets/org/a", "data sets of ModelScope are not fetched here"),
        ("aistudio://org/none", "org/none on aistudio: there is no such model or revision"),
        ("aistudio://org/gated", "access is restricted: .* set AISTUDIO_ACCESS_TOKEN"),
        ("aistudio://org/tiny@no-such", "org/tiny@no-such .* there is no such model or revision"),
        (
            "aistudio://datasets/org/a",
            "AI Studio are not fetched .*aistudio download --dataset org",
        ),
    ],
)
def test_what_is_not_to_be_had_is_explained(hub, name, told):
    with pytest.raises(RuntimeError, match=told):
        local_folder(name)


@HUBS
def test_what_a_hub_cannot_give_is_explained(hub, name, monkeypatch):
    hub.files = {"pytorch_model.bin": b"\x80"}
    with pytest.raises(RuntimeError, match=r"has no file \*.json"):
        local_folder(name)
    hub.files = {"../x.json": b"{}"}
    for plain in PLAIN:
        with pytest.raises(RuntimeError, match="the path '../x.json' or its hash"):
            local_folder(plain)
    for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "STUDIO_GIT_HOST"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"(HF|MODELSCOPE)_ENDPOINT|STUDIO_GIT_HOST"):
        local_folder(name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"pip install 'paddle-vl\[hub\]', or give a local"):
        local_folder("org/tiny")


def test_the_record_of_a_run_says_what_a_folder_is(hub):
    settings = {"a": str(local_folder("org/tiny")), "b": str(local_folder("ms://org/tiny"))}
    assert origins({**settings, "c": "models/tiny", "d": None}) == {
        "a": f"org/tiny@{COMMIT}",
        "b": "org/tiny@master",
    }


def test_the_default_cache_is_that_of_the_hubs_own_clients(monkeypatch):
    for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "MODELSCOPE_CACHE",
                     "AISTUDIO_CACHE_HOME"):  # fmt: skip
        monkeypatch.delenv(variable, raising=False)
    assert huggingface.cache_folder() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "/h")
    assert huggingface.cache_folder() == Path("/h/hub")
    assert ModelScope().cache_folder() == Path.home() / ".cache/modelscope"
    assert AIStudio().cache_folder() == Path.home() / ".cache/aistudio/hub"
