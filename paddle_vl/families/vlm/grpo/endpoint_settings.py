"""Settings of a server that samples the answers which a run learns from. Read without Paddle."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from paddle_vl.config.section import FilePath, Section
from paddle_vl.families.vlm.grpo.settings import GRPOConfig


class RolloutConfig(Section):
    """A server with OpenAI's interface in place of the trained model (train.rollout)."""

    endpoint: str
    """address of a server that samples the answers, e.g. http://127.0.0.1:8000/v1"""
    model: str
    """its name of the model, with model.lora of the adapter that the run gives it"""
    api_key_file: FilePath | None = None
    """file of the server's token; default: the variable OPENAI_API_KEY"""
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """longest time of a request, the answers to a prompt, in seconds"""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """how often a request is sent again after a broken connection, a late answer or an error of the
    server, each time after twice as many seconds; one that is refused is not"""
    sync_steps: Annotated[int, Field(ge=1)] = 1
    """updates after which the next generation is sampled with new weights"""
    sync_folder: FilePath | None = None
    """folder in which the server finds the weights, or the adapter's, as rollout_weights, under a
    path that both know; default: train.output_dir"""
    retokenize: bool = False
    """learn tokens that the tokenizer makes of the answers' texts, of a server that gives neither
    token ids nor log-probabilities; they may be others than were sampled, and nothing corrects for
    the server's numbers"""

    def problems(self, grpo: GRPOConfig) -> Iterator[str]:
        """Messages about settings that contradict each other."""
        if not self.endpoint.startswith(("http://", "https://")):
            yield (
                f"train.rollout.endpoint {self.endpoint} is no address: give the part before "
                "/chat/completions, e.g. http://127.0.0.1:8000/v1"
            )
        of_sampler = grpo.old_log_probs == "sampler"
        corrects = of_sampler or grpo.importance_sampling_mode is not None
        if self.retokenize and corrects:
            yield (
                "train.rollout.retokenize is set, so the server gives no log-probabilities, which "
                "grpo.old_log_probs sampler and grpo.importance_sampling_mode need: remove one"
            )
        if self.sync_steps > 1 and not of_sampler:
            yield (
                f"train.rollout.sync_steps is {self.sync_steps}: answers would be of older weights "
                "than the ones that ratios compare with; set it to 1, or grpo.old_log_probs=sampler"
            )
