"""Models and data sets by their names on hubs.

Guarantees: a path is never looked up on a hub; only files that are needed are fetched, once, with
the requests that the hubs' own clients make; broken downloads go on; the offline switches send
nothing; every refusal says what to do.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paddle_vl.files import huggingface, modelscope
from paddle_vl.files.hub import local_folder, path_or_download
from paddle_vl.files.hub_names import HubName, hub_name, origins
from tests.support.hub_server import COMMIT, HubServer, local_hub

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/hub/requests.json").read_text())
hub = pytest.fixture(local_hub)
HUBS = pytest.mark.parametrize("name", ["hf://org/tiny", "ms://org/tiny"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/a", HubName("huggingface", "model", "org/a")),
        ("org/a-1.5@v1.0", HubName("huggingface", "model", "org/a-1.5", "v1.0")),
        ("hf://org/a@refs/pr/1", HubName("huggingface", "model", "org/a", "refs/pr/1")),
        ("HF::org/a", HubName("huggingface", "model", "org/a")),
        ("hf://datasets/org/a", HubName("huggingface", "dataset", "org/a")),
        ("ms::org/a", HubName("modelscope", "model", "org/a")),
        ("aistudio::org/a", HubName("aistudio", "model", "org/a")),
        *(
            (path, None)
            for path in ("a", "./a/b", "/a/b", "a/b/c", "../a", "a/..", "~/a", "", "a/")
        ),
    ],
)
def test_a_text_is_a_name_or_a_path(text, expected, monkeypatch):
    monkeypatch.delenv("PADDLE_VL_HUB", raising=False)
    assert hub_name(text) == expected


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
        ("hf://org", {}, "'hf://org' names nothing on a hub: write hf://org/name"),
        ("hf://org/../a", {}, "names nothing on a hub"),
        ("org/a", {"hub": "github"}, "hub is 'github': use one of huggingface, modelscope"),
        ("ms://org/a", {"hub": "huggingface"}, "is on modelscope, but hub is huggingface"),
        ("org/a@v1", {"revision": "v2"}, "org/a@v1 has another revision than 'v2'"),
    ],
)
def test_contradictions_in_a_name_are_refused(text, arguments, told):
    with pytest.raises(ValueError, match=told):
        hub_name(text, **arguments)


def test_a_variable_chooses_the_hub_of_names_without_a_prefix(monkeypatch):
    monkeypatch.setenv("PADDLE_VL_HUB", "modelscope")
    assert [hub_name(text).hub for text in ("org/a", "hf://org/a")] == ["modelscope", "huggingface"]
    assert hub_name("org/a", hub="huggingface").hub == "huggingface"
    monkeypatch.setenv("PADDLE_VL_HUB", "elsewhere")
    with pytest.raises(ValueError, match="PADDLE_VL_HUB is 'elsewhere': use one of"):
        hub_name("org/a")


def asked(hub: HubServer) -> list[str]:
    """Method and path of every request that was answered, sorted; clears them."""
    found = sorted(f"{method} {path}" for method, path, status in hub.requests if status != 404)
    hub.requests.clear()
    return found


def recorded(client: str, story: str, *without: str) -> list[str]:
    found = [f"{method} {path}" for method, path, _ in GOLDEN[client][story]]
    return sorted(each for each in found if not any(name in each for name in without))


def test_needed_files_are_fetched_with_the_requests_of_huggingface_hub(hub, tmp_path):
    folder = local_folder("org/tiny")
    assert folder == tmp_path / "hf/models--org--tiny/snapshots" / COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == fetched_of(hub)
    assert asked(hub) == recorded("huggingface", "snapshot", "sub/notes.txt")
    assert local_folder("org/tiny") == folder
    assert asked(hub) == recorded("huggingface", "snapshot_again")


def test_needed_files_are_fetched_with_the_requests_of_modelscopes_client(hub, tmp_path):
    hub.files["configuration.json"] = hub.files.pop("tokenizer.json")
    folder = local_folder("ms://org/tiny")
    assert folder == tmp_path / "ms/models/org--tiny/snapshots/master"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == fetched_of(hub)
    first = asked(hub)
    # The redirect to the host of large files has the same path.
    assert sorted(set(first)) == recorded("modelscope", "snapshot", "internalAcceleration")
    assert local_folder("ms://org/tiny") == folder
    assert asked(hub) == [each for each in first if "repo/files" in each]


def fetched_of(hub: HubServer) -> dict[str, bytes]:
    return {name: data for name, data in hub.files.items() if name.endswith(("json", "tensors"))}


@HUBS
def test_offline_a_complete_folder_needs_no_request_and_an_incomplete_one_is_refused(
    hub, name, monkeypatch
):
    folder = local_folder(name, patterns=["*.json"])
    monkeypatch.setenv("PADDLE_VL_OFFLINE", "1")
    asked(hub)
    assert local_folder(name, patterns=["*.json"]) == folder
    for absent, patterns in ((name, None), (name.replace("tiny", "other"), ["*.json"])):
        with pytest.raises(RuntimeError, match=r"in the cache.* requests are turned off: download"):
            local_folder(absent, patterns=patterns)
    assert hub.requests == []


@HUBS
def test_a_broken_download_goes_on_by_itself(hub, name):
    hub.breaks = 1
    folder = local_folder(name)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_download_from_modelscope_goes_on_in_another_process(hub, has_ranges, tmp_path):
    hub.breaks = 20
    hub.has_ranges = False
    with pytest.raises(RuntimeError, match=r"safetensors of model org/tiny.* ends at byte 524288"):
        local_folder("ms://org/tiny", patterns=["*.safetensors"])
    assert not [*(tmp_path / "ms").rglob("*.safetensors")]
    hub.breaks, hub.has_ranges = 0, has_ranges
    folder = local_folder("ms://org/tiny")
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    ranges = [headers["Range"] for headers in hub.sent if "Range" in headers]
    assert "bytes=524288-" in ranges


def test_a_file_with_another_hash_is_not_kept(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(modelscope, "_sha256", lambda path: "0" * 64)
    with pytest.raises(RuntimeError, match=r"has not the SHA-256 \w{64} of the listing"):
        local_folder("ms://org/tiny", patterns=["config.json"])
    assert not [file for file in (tmp_path / "ms/models").rglob("*") if file.is_file()]


def test_a_branch_of_modelscope_that_has_moved_replaces_and_removes_files(hub):
    folder = local_folder("ms://org/tiny")
    kept = (folder / "model.safetensors").stat().st_ino
    hub.files["config.json"] = hub.files["config.json"].replace(b"qwen3", b"qwen4")
    del hub.files["tokenizer.json"]
    local_folder("ms://org/tiny")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == fetched_of(hub)
    assert (folder / "model.safetensors").stat().st_ino == kept


@pytest.mark.parametrize("path", ["../x.json", "/x.json"])
def test_a_listing_cannot_write_elsewhere(hub, path):
    hub.files[path] = b"{}"
    with pytest.raises(RuntimeError, match="has strange paths or hashes"):
        local_folder("ms://org/tiny")


@HUBS
def test_a_token_goes_to_the_hub_and_not_to_the_host_of_large_files(hub, name, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    local_folder(name)
    with_token = {headers["Host"] for headers in hub.sent if "secret" in str(headers)}
    assert with_token == {hub.address.removeprefix("http://")}
    assert {headers["Host"] for headers in hub.sent} > with_token


@HUBS
def test_threads_that_ask_at_once_download_once(hub, name):
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(local_folder, [name] * 4))) == 1
    assert len([each for each in asked(hub) if "config.json" in each and "GET" in each]) == 1


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
        ("aistudio://org/a", "AI Studio are not fetched here: .*aistudio download --model org/a"),
    ],
)  # fmt: skip
def test_what_is_not_to_be_had_is_explained(hub, name, told):
    with pytest.raises(RuntimeError, match=told):
        local_folder(name)


@HUBS
def test_a_model_without_a_needed_file_is_refused(hub, name):
    hub.files = {"pytorch_model.bin": b"\x80"}
    with pytest.raises(RuntimeError, match=r"has no file \*.json"):
        local_folder(name)


@HUBS
def test_a_hub_out_of_reach_is_explained(hub, name, monkeypatch):
    for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"(HF|MODELSCOPE)_ENDPOINT"):
        local_folder(name)


def test_without_the_package_the_extra_is_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"pip install 'paddle-vl\[hub\]', or give a local"):
        local_folder("org/tiny")


def test_the_record_of_a_run_says_what_a_folder_is(hub):
    folders = {"a": local_folder("org/tiny"), "b": local_folder("ms://org/tiny")}
    settings = {name: str(folder) for name, folder in folders.items()}
    assert origins({**settings, "c": "models/tiny", "d": None}) == {
        "a": {"name": "org/tiny", "revision": COMMIT},
        "b": {"name": "org/tiny", "revision": "master"},
    }


def test_the_default_cache_is_that_of_the_hubs_own_clients(monkeypatch):
    from huggingface_hub import constants

    for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    assert (
        huggingface.cache_folder() == Path(constants.default_home).expanduser() / "huggingface/hub"
    )
    monkeypatch.setenv("HF_HOME", "/h")
    assert huggingface.cache_folder() == Path("/h/hub")
    assert modelscope.cache_folder() == Path.home() / ".cache/modelscope"
