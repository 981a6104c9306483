"""Answers that a server samples, and the weights that it is given.

Prompts travel as conversations, and come back as the token ids that the server made of them, which
must be the trained ones. Answers come back as token ids and log-probabilities, in the fields of
vLLM's interface; or as texts, which are tokenized here.

Shapes: G answers to a prompt, C tokens of an answer.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.families.vlm.answering.groups import Sampled
from paddle_vl.families.vlm.answering.server import (
    NoSuchPathError,
    ServerClient,
    answer_text,
    asked_message,
)
from paddle_vl.families.vlm.grpo.endpoint_settings import RolloutConfig
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.files.token_file import read_token
from paddle_vl.generation.sampling import Sampling

# Answers of a request; a larger group takes several.
_AT_ONCE = 32
_ID = "token_id:"
_FIELDS = {"content", "role", "loss"}
_OTHER_FORM = (ValueError, LookupError, TypeError, AttributeError)


class RolloutServer:
    """
    Args:
        variables: of the chat template; a prompt's own win.
        at_once: prompts that are asked at once.
        folder: of the weights that it is given.

    Attributes:
        sync_steps: see `RolloutConfig`.

    Raises:
        ValueError, OSError: the token cannot be read.
    """

    def __init__(
        self,
        settings: RolloutConfig,
        processor: VLProcessor,
        variables: Mapping[str, Any],
        at_once: int,
        folder: Path,
    ):
        self.settings, self.sync_steps, self.folder = settings, settings.sync_steps, folder
        self._processor, self._variables, self._at_once = processor, variables, at_once
        key = read_token(settings.api_key_file, "OPENAI_API_KEY")
        self._client = ServerClient(key, settings.timeout_s, settings.retries)
        self._url = settings.endpoint.rstrip("/")

    def sampled(
        self,
        prompts: Sequence[tuple[Conversation, np.ndarray]],
        samplings: Sequence[Sequence[Sampling]],
    ) -> list[list[Sampled]]:
        """The answers to prompts.

        Args:
            prompts: each with its ids `[L]`.
            samplings: of all answers to each prompt, which differ in their number alone.

        Raises:
            ValueError: a prompt that cannot be sent, or that the server reads as other tokens.
            RuntimeError: no answers, or answers of another form.
        """
        client = self._client
        client.is_over.clear()
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="prompt") as threads:
            try:
                return [*threads.map(self._answers, prompts, samplings)]
            finally:
                # No other prompt waits for the server after an error.
                client.is_over.set()

    def load(self, is_adapter: bool) -> None:
        """Have the server take the weights in the folder, for what it is asked from now on.

        Raises:
            RuntimeError: it does not.
        """
        name, folder = self.settings.model, self.folder
        parts = urlsplit(self._url)
        root = f"{parts.scheme}://{parts.netloc}"
        try:
            if is_adapter:
                fields = {"lora_name": name, "load_inplace": True, "lora_path": str(folder)}
                answer = self._client.post(f"{self._url}/load_lora_adapter", fields)
                keeps = answer.startswith(b"Success")  # The words of vLLM alone.
            else:
                keeps = self._load_model(root, {"model_path": str(folder)})
            # vLLM keeps images and prompts as the old weights read them.
            for path in ("reset_encoder_cache", "reset_prefix_cache") if keeps else ():
                self._client.post(f"{root}/{path}", {})
        except RuntimeError as error:
            raise RuntimeError(
                f"the server does not load {folder}: {error}; it needs the folder under this path, "
                "and leave to load it (paddle-vl serve --allowed-weights-path; vLLM "
                "VLLM_SERVER_DEV_MODE=1, of adapters VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 too)"
            ) from error

    def _load_model(self, root: str, fields: Mapping[str, str]) -> bool:
        """Have it take a whole model, SGLang's way or vLLM's; whether it was vLLM's."""
        try:
            self._client.post(f"{root}/update_weights_from_disk", fields)
        except NoSuchPathError:
            call = {"method": "reload_weights", "kwargs": {"weights_path": fields["model_path"]}}
            self._client.post(f"{root}/collective_rpc", call)
            return True
        return False

    def _answers(
        self, prompt: tuple[Conversation, np.ndarray], samplings: Sequence[Sampling]
    ) -> list[Sampled]:
        (conversation, ids_L), sampling, found = prompt, samplings[0], list[Sampled]()
        for begin in range(0, len(samplings), _AT_ONCE):
            count = min(_AT_ONCE, len(samplings) - begin)
            fields = self._fields(conversation, sampling)
            assert sampling.seed is not None, "rollouts have seeds"
            # Each answer has the next one.
            fields |= {"n": count, "seed": (sampling.seed + begin) % 2**62}
            body = self._client.post(f"{self._url}/chat/completions", fields)
            try:
                answer = json.loads(body)
                self._check_prompt(answer, ids_L)
                choices = sorted(answer["choices"], key=lambda each: each["index"])
                if len(choices) != count:
                    raise LookupError(f"{len(choices)} answers in place of {count}")
                found += [self._answer(each, sampling) for each in choices]
            except _OTHER_FORM as error:
                raise RuntimeError(
                    f"train.rollout: {self._url} as {self.settings.model}: {error}"
                ) from error
        return found

    def _fields(self, conversation: Conversation, sampling: Sampling) -> dict[str, Any]:
        messages = conversation.messages
        others = {key for each in messages for key in each if key not in _FIELDS}
        if conversation.tools or conversation.videos or others:
            raise ValueError(
                f"train.rollout.endpoint: a prompt with {', '.join(sorted(others)) or 'tools'} or "
                "videos is not sent to a server, which gets texts and images: remove them, or "
                "train.rollout"
            )
        fields = {
            "model": self.settings.model,
            "messages": [*map(asked_message, messages)],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # In place of those of the model's files.
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": [*sampling.stop_token_ids],
            "logit_bias": {str(each): -100 for each in sampling.suppress_tokens},
        }
        if variables := {**self._variables, **conversation.chat_template_kwargs}:
            fields["chat_template_kwargs"] = variables
        if not self.settings.retokenize:
            fields |= {"logprobs": True, "return_token_ids": True}
        return fields

    def _check_prompt(self, answer: Mapping[str, Any], ids_L: np.ndarray) -> None:
        """Whether the server has read the prompt as it is trained."""
        given = answer.get("prompt_token_ids")
        own = ids_L.tolist()
        if given is None:
            given, own = answer["usage"]["prompt_tokens"], len(own)
        if given != own:
            count = given if isinstance(given, int) else len(given)
            raise ValueError(
                f"the server has a prompt of {count} tokens, and the run another of {len(ids_L)}: "
                "start the server with the run's model folder, and set neither data.max_pixels, "
                "data.min_pixels nor data.processor to something else"
            )

    def _answer(self, choice: Mapping[str, Any], sampling: Sampling) -> Sampled:
        reason, ends = choice["finish_reason"], sampling.stop_token_ids
        is_cut = reason == "length"
        if self.settings.retokenize:
            text = answer_text(choice)
            ids = self._processor.tokenizer.encode(text)[: sampling.max_tokens]
            # Texts have no end; one that is longer now has none either.
            is_cut = is_cut or len(ids) == sampling.max_tokens
            ids += [] if is_cut else [ends[0]]
            return Sampled(np.array(ids, np.int64), np.full(len(ids), np.nan, np.float32), is_cut)
        entries = (choice.get("logprobs") or {}).get("content") or []
        ids = choice.get("token_ids")
        if ids is None and all(each["token"].startswith(_ID) for each in entries):
            ids = [int(each["token"].removeprefix(_ID)) for each in entries]
        if not ids or len(entries) != len(ids):
            raise LookupError(
                f"an answer has {len(ids or ())} token ids and {len(entries)} log-probabilities, "
                "which must be given for every token (paddle-vl serve and vLLM from 0.10.2 do): "
                "take another server, or set train.rollout.retokenize=true"
            )
        if not is_cut and ids[-1] not in ends:
            raise ValueError(
                f"an answer ended by {reason!r} with token {ids[-1]}, which is no end of the model "
                f"({', '.join(map(str, ends))}): the server has other settings of it"
            )
        log_probs = np.array([each["logprob"] for each in entries], np.float32)
        return Sampled(np.array(ids, np.int64), log_probs, is_cut)
