"""Settings of learning from rewards, under TRL's names. Read without Paddle."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paddle_vl.config.section import FilePath, Section
from paddle_vl.families.vlm.grpo.other_names import renamed

LossType = Literal[
    "dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "cispo_range", "sapo", "vespo", "gmpo",
    "rloo", "real", "fipo",
]  # fmt: skip
SamplerMode = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate",
    "geometric_mask",
]  # fmt: skip
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
# Losses with a term for each token, and of these the ones of PPO's clipped ratio.
CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "fipo")
OF_TOKENS = (*CLIPPED, "cispo", "cispo_range", "sapo", "vespo")
# The losses that read a setting, of settings that not all losses read.
_READ_BY = {
    "epsilon": (*CLIPPED, "cispo_range", "gmpo", "rloo"),
    "epsilon_high": (*CLIPPED, "cispo", "cispo_range", "gmpo", "rloo"),
    "delta": CLIPPED,
    "clip_ratio_c": CLIPPED,
    "loss_agg_mode": OF_TOKENS,
    "importance_sampling_level": tuple(each for each in OF_TOKENS if each != "vespo"),
    "kl_estimator": (*OF_TOKENS, "gmpo", "real"),
    "use_bias_correction_kl": OF_TOKENS,
    "entropy_coef": OF_TOKENS,
    "top_entropy_quantile": OF_TOKENS,
    "off_policy_mask_threshold": OF_TOKENS,
    "importance_sampling_mode": OF_TOKENS,
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
    "real_tau": ("real",),
    "fipo_decay_rate": ("fipo",),
    "fipo_clip_range": ("fipo",),
    "fipo_clip_high_only": ("fipo",),
    "fipo_safety_threshold": ("fipo",),
}
# In front of the pattern of a reward.
FORMAT = "format:"
_KEPT_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


class GRPOConfig(Section):
    """Learning from rewards (train.objective: grpo)."""

    loss_type: LossType = "dapo"
    """loss: dapo, a mean over all tokens of an update; grpo, over answers of means over their
    tokens (GSPO with importance_sampling_level sequence); dr_grpo, divided by the longest length;
    luspo, sums of answers; cispo, of capped weights (cispo_range: clipped to both sides, MiniMax's
    and verl's); sapo, with a soft gate; vespo; gmpo, geometric means; rloo, of whole answers; real,
    better answers of a group against the others; fipo, dapo with terms weighed by how much likelier
    the tokens behind them have become; bnpo is dapo, since a divisor is that of the
    whole update"""
    loss_agg_mode: Aggregation | None = None
    """verl's name of how token terms are added up, in place of what loss_type says; answers without
    a learned token leave the divisor"""
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """ratio of the policies by token, or the geometric mean over an answer's tokens (GSPO), whose
    gradient with sequence_token is each token's own (GSPO-token)"""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """how far below 1 a ratio may fall before it is clipped; of gmpo, of a log-ratio"""
    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """the same above 1, default: epsilon; of cispo the largest weight itself, at least 1, e.g. 5"""
    delta: Annotated[float | None, Field(gt=1)] = None
    """largest ratio where the advantage is negative (two-sided clipping)"""
    clip_ratio_c: Annotated[float | None, Field(gt=1)] = None
    """where the advantage is negative, a loss of at most this times it (dual clip; verl: 3)"""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL divergence from the reference; 0: no reference"""
    kl_estimator: Literal["k3", "k1", "abs", "k2", "k3+"] = "k3"
    """estimate of the KL divergence from one sampled token; k3+ has the value of k3 and the
    gradient of k2; the gradient of k1 is 0 in the mean"""
    kl_clamp: Annotated[float | None, Field(gt=0)] = 10.0
    """largest KL estimate of a token, as verl and ms-swift have it (their log-ratios end at 20
    too); null: no bound, as TRL"""
    use_bias_correction_kl: bool | None = None
    """multiply the estimate by the ratio of the policies, whose gradient then is that of the KL
    divergence; default: with k3, except for gmpo and real"""
    ref_model: FilePath | None = None
    """the reference; default: model.pretrained, with model.lora without its adapters"""
    entropy_coef: float = 0.0
    """weight of the mean entropy of tokens, which is subtracted from the loss"""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of a micro-batch's tokens, those of the highest entropy, that keep a policy term"""
    off_policy_mask_threshold: Annotated[float | None, Field(gt=0)] = None
    """answers with a negative advantage lose their policy term if their tokens have become less
    likely than this, in nats a token"""
    importance_sampling_mode: SamplerMode | None = None
    """correct for a sampler whose log-probabilities are not the trainer's: the weight of a token,
    or the product of an answer's, truncated at importance_sampling_clip_max, or 0 outside of the
    bounds; geometric: by the geometric mean of an answer's, which geometric_mask leaves as they
    are within the bounds (ms-swift's modes of sequences)"""
    importance_sampling_weighs_kl: bool = False
    """multiply the KL estimate by these weights too, as ms-swift"""
    importance_sampling_clip_max: Annotated[float, Field(ge=1)] = 3.0
    """largest weight of importance_sampling_mode"""
    importance_sampling_clip_min: Annotated[float | None, Field(gt=0, le=1)] = None
    """smallest weight of importance_sampling_mode"""
    old_log_probs: Literal["computed", "sampler"] = "computed"
    """log-probabilities of the policy that answered: computed before the first update, or those of
    the sampler (verl's bypass_mode)"""
    max_sampling_logp_difference: Annotated[float | None, Field(gt=0)] = 0.05
    """largest mean difference, in nats a token, between the sampler's and the trainer's
    log-probabilities of one policy; a run with more ends"""
    sapo_temperature_pos: Annotated[float, Field(gt=0)] = 1.0
    """steepness of sapo's gate where the advantage is positive"""
    sapo_temperature_neg: Annotated[float, Field(gt=0)] = 1.05
    """the same where it is not"""
    vespo_k_pos: Annotated[float, Field(ge=0)] = 2.0
    """power of vespo's weight where the advantage is not negative"""
    vespo_lambda_pos: Annotated[float, Field(ge=0)] = 3.0
    """its decay there"""
    vespo_k_neg: Annotated[float, Field(ge=0)] = 3.0
    """power of vespo's weight where the advantage is negative"""
    vespo_lambda_neg: Annotated[float, Field(ge=0)] = 2.0
    """its decay there"""
    real_tau: Annotated[float, Field(gt=0)] = 0.5
    """divides real's scores, the mean log-ratios of answers"""
    fipo_decay_rate: Annotated[float, Field(gt=0)] = 32.0
    """tokens after which a later log-ratio counts half in fipo's weight"""
    fipo_clip_range: Annotated[float | None, Field(gt=0, lt=1)] = 0.2
    """how far from 1 fipo's weight may be; null: no bound"""
    fipo_clip_high_only: bool = True
    """a weight of fipo of at least 1"""
    fipo_safety_threshold: Annotated[float | None, Field(gt=0)] = 4.0
    """ratio above which the weight is 0.8 to 1 where the advantage is negative; null: none"""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """answers to a prompt, which are compared with each other"""
    num_iterations: Annotated[int, Field(ge=1)] = 1
    """how often the answers of a generation are learned"""
    steps_per_generation: Annotated[int | None, Field(ge=1)] = None
    """micro-batches of a generation; default: train.gradient_accumulation_steps"""
    max_completion_length: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    """longest answer, in tokens"""
    mask_truncated_completions: bool = False
    """learn nothing from answers without an end; they stay in their group's mean"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """of sampling, and of all log-probabilities and entropies"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """smallest set of tokens of this probability to sample from"""
    top_k: Annotated[int, Field(ge=0)] = 0
    """number of tokens to sample from; 0: all"""
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """smallest probability of a token, as a share of the largest"""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """divides the scores of tokens that were there"""
    biased_sampling: bool = False
    """allow top_p, top_k, min_p and repetition_penalty, with which answers are not drawn from the
    policy whose log-probabilities are learned"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the deviation of the rewards of the group, of the batch, or not"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """normalise the sum of an answer's rewards, or each reward in its group and then the sum over
    the batch (GDPO)"""
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] | None = None
    """distance from the mean of the group, or of its other answers; default: rloo with loss_type
    rloo; reinforce_plus_plus: from the mean of the group, scaled by the deviation of these
    distances (scale_rewards, here batch by default); the latter two have the KL in rewards"""
    normalize_advantages: bool = False
    """divide rloo's advantages by their deviation over the batch"""
    reward_clip_range: Annotated[list[float] | None, Field(min_length=2, max_length=2)] = None
    """least and largest reward of an answer, with rloo"""
    rewards: list[str] = Field(default=[])
    """what scores answers: metrics of evaluation by name, format:PATTERN, or functions as
    my_rewards.py:function"""
    reward_weights: list[float] | None = None
    """a weight for each of rewards; default: 1"""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """longest time of a call of a reward, in seconds"""
    on_reward_error: Literal["fail", "skip"] = "fail"
    """end the run, or leave an answer out, when a reward fails on it"""
    dynamic_sample: bool = False
    """leave out groups whose outcome_rewards are all equal, and answer further prompts in their
    place (DAPO)"""
    max_resample_times: Annotated[int, Field(ge=0)] = 3
    """how often further prompts are answered for one generation, with dynamic_sample; then it has
    the groups that were found"""
    outcome_rewards: list[str] | None = None
    """of rewards those that say right or wrong, for dynamic_sample; default: all but formats"""
    max_num_seqs: Annotated[int, Field(ge=2)] = 128
    """most answers that a data rank samples at once; their keys and values take memory"""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """With the names of other packages replaced, and the ways that TRL writes a value."""
        return renamed(values) if isinstance(values, dict) else values

    @property
    def upper(self) -> float:
        """`epsilon_high`, or what stands for it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def corrects_kl(self) -> bool:
        """Whether the KL estimate is multiplied by the ratio."""
        if (given := self.use_bias_correction_kl) is not None:
            return given
        return self.kl_estimator == "k3" and self.loss_type in OF_TOKENS

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities of a reference are needed."""
        return self.beta > 0

    @property
    def estimator(self) -> Literal["grpo", "rloo", "reinforce_plus_plus"]:
        """How advantages are estimated."""
        return self.advantage_estimator or ("rloo" if self.loss_type == "rloo" else "grpo")

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL term is in the rewards, not in the loss."""
        return self.has_reference and self.estimator != "grpo"

    @property
    def patterns(self) -> list[str]:
        """Of the rewards that compare an answer with one."""
        own = [each for each in self.rewards if each.startswith(FORMAT)]
        return [each.removeprefix(FORMAT) for each in own]

    @property
    def weights(self) -> list[float]:
        """Of the rewards."""
        return self.reward_weights or [1.0] * len(self.rewards)

    def is_on_policy(self, accumulation: int) -> bool:
        """Whether every update learns answers of the weights that it starts from, so that the old
        log-probabilities are the policy's own.

        Args:
            accumulation: micro-batches of an update.
        """
        steps = self.steps_per_generation or accumulation
        return accumulation % (steps * self.num_iterations) == 0

    def problems(self, rows: int, accumulation: int) -> Iterator[str]:
        """Messages about settings that contradict each other.

        Args:
            rows: answers of a micro-batch on all data ranks.
            accumulation: micro-batches of an update.
        """
        yield from self._loss_problems()
        yield from self._advantage_problems()
        steps, group = self.steps_per_generation or accumulation, self.num_generations
        if steps % accumulation:
            yield (
                f"grpo.steps_per_generation is {steps} and train.gradient_accumulation_steps "
                f"{accumulation}: an update would be of two generations; make it a multiple"
            )
        if rows * steps % group:
            yield (
                f"a generation has {rows * steps} answers ({rows} of a micro-batch on all ranks, "
                f"{steps} of these), which groups of grpo.num_generations {group} do not fill: "
                f"make it a multiple of {group}"
            )
        for name, plain in _KEPT_SAMPLING.items():
            value = getattr(self, name)
            if value != plain and not self.biased_sampling:
                yield (
                    f"grpo.{name} is {value}: answers would be drawn from another distribution "
                    f"than the one that is learned; set it to {plain}, or grpo.biased_sampling=true"
                )
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.rewards):
            yield (
                f"grpo.reward_weights has {len(weights)} weights for {len(self.rewards)} of "
                "grpo.rewards: give one for each"
            )
        if len({*self.rewards}) < len(self.rewards):
            yield f"grpo.rewards {self.rewards} names a reward twice: add up their weights"
        if group > self.max_num_seqs:
            yield (
                f"grpo.num_generations is {group} and grpo.max_num_seqs {self.max_num_seqs}: the "
                "answers to a prompt are sampled at once; raise max_num_seqs"
            )
        if unknown := [each for each in self.outcome_rewards or () if each not in self.rewards]:
            yield f"grpo.outcome_rewards names {', '.join(unknown)}, which grpo.rewards has not"
        if self.outcome_rewards and not self.dynamic_sample:
            yield "grpo.outcome_rewards is set but grpo.dynamic_sample is not: set it, or remove it"

    def _loss_problems(self) -> Iterator[str]:
        name, fields = self.loss_type, type(self).model_fields
        for setting, losses in _READ_BY.items():
            value = getattr(self, setting)
            if value != fields[setting].default and name not in losses:
                yield (
                    f"grpo.{setting} is {value}, which grpo.loss_type {name} does not read: remove "
                    f"it, or use one of {', '.join(losses)}"
                )
        if name == "cispo" and (self.epsilon_high or 0) < 1:
            yield (
                f"grpo.epsilon_high is {self.epsilon_high}, which is the largest weight of "
                "grpo.loss_type cispo, so that all gradients would shrink: set it to 1 or more, "
                "e.g. 5.0, or use cispo_range, which clips to [1 - epsilon, 1 + epsilon_high]"
            )
        if self.delta is not None and self.delta <= 1 + self.upper:
            yield (
                f"grpo.delta is {self.delta}, within the clipped ratios, which end at "
                f"{1 + self.upper:g}: set a larger one"
            )
        if self.use_bias_correction_kl and self.kl_estimator != "k3":
            yield (
                f"grpo.use_bias_correction_kl is set with grpo.kl_estimator {self.kl_estimator}: "
                "it corrects k3 alone"
            )
        of_kl = ("kl_estimator", "kl_clamp", "use_bias_correction_kl", "ref_model")
        for setting in of_kl if not self.beta else ():
            if (value := getattr(self, setting)) != fields[setting].default:
                yield f"grpo.{setting} is {value} but grpo.beta is 0, so there is no KL: set beta"
        if self.importance_sampling_weighs_kl and not self.beta:
            yield "grpo.importance_sampling_weighs_kl is set but grpo.beta is 0: there is no KL"
        mode = self.importance_sampling_mode
        names = ("clip_max", "clip_min", "weighs_kl")
        for setting in (f"importance_sampling_{each}" for each in names):
            if mode is None and (value := getattr(self, setting)) != fields[setting].default:
                yield f"grpo.{setting} is {value} but grpo.importance_sampling_mode is not set"
        if mode is not None and name == "vespo" and not mode.startswith("token"):
            yield (
                f"grpo.importance_sampling_mode is {mode}, but vespo multiplies the weights of "
                "tokens: use token_truncate or token_mask"
            )
        if mode is not None and self.old_log_probs == "sampler":
            yield (
                f"grpo.importance_sampling_mode is {mode}, but with grpo.old_log_probs sampler "
                "there is nothing to correct: remove one of them"
            )

    def _advantage_problems(self) -> Iterator[str]:
        is_rloo, fields = self.estimator == "rloo", type(self).model_fields
        if self.loss_type == "rloo" and not is_rloo:
            yield "grpo.loss_type rloo has advantages of its own: remove grpo.advantage_estimator"
        readers = {"scale_rewards": ("grpo", "reinforce_plus_plus")}
        readers |= {"multi_objective_aggregation": ("grpo",)}
        readers |= dict.fromkeys(("normalize_advantages", "reward_clip_range"), ("rloo",))
        if self.has_reference and self.loss_type != "rloo":
            # Of the KL term in a loss.
            names = ("kl_estimator", "kl_clamp", "use_bias_correction_kl")
            readers |= dict.fromkeys((*names, "importance_sampling_weighs_kl"), ("grpo",))
        for setting, of in readers.items():
            value = getattr(self, setting)
            if self.estimator not in of and value != fields[setting].default:
                yield (
                    f"grpo.{setting} is {value}, which advantages of {self.estimator} do not read: "
                    f"remove it, or set grpo.advantage_estimator={of[0]}"
                )
        if (
            self.multi_objective_aggregation == "normalize_then_sum"
            and self.scale_rewards != "group"
        ):
            yield (
                f"grpo.scale_rewards is {self.scale_rewards}, which normalize_then_sum does not "
                "read: remove it"
            )
        if self.reward_clip_range and not self.reward_clip_range[0] < self.reward_clip_range[1]:
            yield f"grpo.reward_clip_range is {self.reward_clip_range}: the first must be smaller"
