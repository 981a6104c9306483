"""Models of AI Studio, a Gitea server that keeps large files by Git LFS.

Its own client (aistudio_sdk 0.3.9) is not used: it prints the errors of downloads and returns a
folder that lacks the files, checks no hash of them by default, asks another host in place of a
mirror's, and reports each download. It has one revision of a model in `models/org/name` of its
cache, with an index that is a pickle; snapshots are beside these folders. See
`paddle_vl.files.plain_hub`.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote, urlencode

from paddle_vl.files.hub_names import HubName
from paddle_vl.files.plain_hub import ListedFile, PlainHub, digested

_POINTER = re.compile(rb"version https://git-lfs\S*\noid sha256:[0-9a-f]{64}\nsize (\d+)\n")
_PER_PAGE, _DEFAULT_REVISION, _LINK = 1000, "master", "120000"


class AIStudio(PlainHub):
    """The API of Gitea, as AI Studio has it.

    A listing has the digest that Git has for a file: of its content, or of the pointer that Git LFS
    stores in its place, which follows from the content. Its sizes may be those of pointers.
    """

    title, digest_name, digest_bytes = "AI Studio", "Git hash", 20
    endpoint_variable, endpoint = "STUDIO_GIT_HOST", "https://git.aistudio.baidu.com"
    cache_variable, cache = "AISTUDIO_CACHE_HOME", "~/.cache/aistudio/hub"
    token_variable = "AISTUDIO_ACCESS_TOKEN"
    data_set_hint = "aistudio download --dataset {} --local_dir FOLDER"

    def token_headers(self, token: str) -> Mapping[str, str]:
        return {"Authorization": f"token {token}"}

    def listed(
        self,
        name: HubName,
        revision: str,
        is_needed: Callable[[str], bool],
        known: Mapping[str, ListedFile],
    ) -> dict[str, ListedFile]:
        tree, listing = quote(self._commit(name, revision), safe=""), {}
        for page in count(1):
            query = urlencode({"recursive": "true", "page": page, "per_page": _PER_PAGE})
            with self.answer(name, f"{self._api(name)}/git/trees/{tree}?{query}") as values:
                entries = values["tree"]
                for each in entries:
                    path, digest = each["path"], each["sha"]
                    if each["type"] != "blob" or each.get("mode") == _LINK:
                        continue
                    self.check_file(path, digest)
                    listing[path] = ListedFile(int(each["size"]), digest)
                is_last = not values.get("truncated", False)
                if not entries and not is_last:
                    raise ValueError(f"page {page} is empty and not the last")
            if is_last:
                break
        for path, (_, digest) in listing.items():
            of_cache = known.get(path)
            if of_cache is not None and of_cache.digest == digest:
                listing[path] = of_cache
            elif is_needed(path):
                listing[path] = ListedFile(self._size(name, revision, path, digest), digest)
        return listing

    def address(self, name: HubName, revision: str, path: str) -> str:
        return self._of_file("media", name, revision, path)

    def digest_fits(self, path: Path, digest: str) -> bool:
        size, content = path.stat().st_size, hashlib.sha256()
        blob = hashlib.sha1(b"blob %d\0" % size)
        digested(path, blob, content)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{content.hexdigest()}\n"
        pointer += f"size {size}\n"
        of_pointer = hashlib.sha1(f"blob {len(pointer)}\0{pointer}".encode())
        return digest in (blob.hexdigest(), of_pointer.hexdigest())

    def _commit(self, name: HubName, revision: str) -> str:
        """The commit of a tag; other revisions as they are."""
        if revision == _DEFAULT_REVISION:
            return revision
        try:
            with self.answer(name, f"{self._api(name)}/tags/{quote(revision, safe='')}") as values:
                return str(values["commit"]["sha"])
        except RuntimeError as error:
            if isinstance(error.__cause__, HTTPError) and error.__cause__.code == 404:
                return revision
            raise

    def _size(self, name: HubName, revision: str, path: str, digest: str) -> int:
        """Bytes of a file, of one in Git LFS those of its content."""
        with self.answer(name, self._of_file("contents", name, revision, path)) as values:
            if values["sha"] != digest:
                raise ValueError(f"{path} has changed since it was listed")
            content = base64.b64decode(values.get("content") or "")
            pointer = _POINTER.fullmatch(content)
            return int(pointer[1] if pointer else values.get("lfs_size") or values["size"])

    def _of_file(self, what: str, name: HubName, revision: str, path: str) -> str:
        address = f"{self._api(name)}/{what}/{quote(path, safe='')}"
        if revision == _DEFAULT_REVISION:
            return address
        return f"{address}?ref={quote(revision, safe='')}"

    def _api(self, name: HubName) -> str:
        return f"{self.root}/api/v1/repos/{quote(name.name)}"
