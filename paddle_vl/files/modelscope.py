"""Models of ModelScope; the cache is that of its own client. See `paddle_vl.files.plain_hub`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from paddle_vl.files.hub_names import HubName
from paddle_vl.files.plain_hub import ListedFile, PlainHub, sha256_of

# The server cuts longer listings off and does not say so.
_LONGEST_LISTING = 3000


class ModelScope(PlainHub):
    """The API of ModelScope."""

    title, digest_name, digest_bytes = "ModelScope", "SHA-256", 32
    endpoint_variable, endpoint = "MODELSCOPE_ENDPOINT", "https://www.modelscope.cn"
    cache_variable, cache = "MODELSCOPE_CACHE", "~/.cache/modelscope"
    token_variable = "MODELSCOPE_API_TOKEN"
    data_set_hint = "modelscope download --dataset {} --local_dir FOLDER"

    def token_headers(self, token: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"}

    def listed(
        self,
        name: HubName,
        revision: str,
        is_needed: Callable[[str], bool],
        known: Mapping[str, ListedFile],
    ) -> dict[str, ListedFile]:
        query = urlencode({"Revision": revision, "Recursive": True})
        with self.answer(name, f"{self._api(name)}/files?{query}") as values:
            entries = values["Data"]["Files"]
            files = [file for file in entries if file["Type"] == "blob"]
            listing = {
                each["Path"]: ListedFile(int(each["Size"]), each["Sha256"]) for each in files
            }
            for path, file in listing.items():
                self.check_file(path, file.digest)
        if len(entries) >= _LONGEST_LISTING:
            raise RuntimeError(
                f"{name} may have more than {_LONGEST_LISTING} files, which ModelScope does not "
                "list: download it with its client, as by `modelscope download --model "
                f"{name.name}`"
            )
        return listing

    def address(self, name: HubName, revision: str, path: str) -> str:
        return f"{self._api(name)}?" + urlencode({"Revision": revision, "FilePath": path})

    def digest_fits(self, path: Path, digest: str) -> bool:
        return sha256_of(path) == digest

    def _api(self, name: HubName) -> str:
        return f"{self.root}/api/v1/models/{quote(name.name)}/repo"
