"""The right setting for a name that is none: names of other trainers, then the nearest spelling.

The tables have names of HF's Trainer, PEFT, ms-swift, LLaMA-Factory, Megatron, PaddleFormers,
ERNIEKit, openpi and LeRobot.
"""

import difflib
from collections.abc import Iterable

# Setting, with a value where their name stands for one, and what others call it; sections that
# stand before a name are left out.
PEERS = {
    "model.pretrained": "model_name_or_path model_id_or_path model_path model_dir model_id "
    "pretrained_model_name_or_path pretrained_path init_from_ckpt",
    "model.compute_dtype": "torch_dtype dtype model_dtype precision mixed_precision compute_type",
    "model.compute_dtype=bfloat16": "bf16 pure_bf16 fp16 half float16 use_amp amp "
    "fp16_opt_level amp_master_grad",
    "model.freeze=[vision]": "freeze_vision freeze_vit freeze_vision_tower",
    "model.freeze=[mergers]": "freeze_aligner freeze_multi_modal_projector freeze_merger",
    "model.freeze=[language]": "freeze_llm freeze_language_model",
    "model.freeze": "freeze_config freeze_parameters",
    "model.lora": "train_type tuner_type finetuning_type fine_tuning peft_config use_peft peft",
    "model.lora.r": "rank lora_rank lora_r",
    "model.lora.lora_alpha": "alpha",
    "model.lora.target_modules": "lora_target lora_target_modules targets",
    "model.lora.modules_to_save": "additional_target lora_modules_to_save",
    "model.lora.use_rslora": "rslora",
    "data.train": "dataset train_dataset train_file train_files train_data data_path "
    "dataset_path train_dataset_path train_dataset_prob dataset_dir repo_id",
    "data.eval": "val_dataset eval_dataset validation_file val_file val_data eval_data "
    "test_file eval_dataset_path valid_dataset eval_dataset_prob",
    "data.format": "train_dataset_type eval_dataset_type",
    "data.processor": "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path "
    "processor_path processor_name",
    "data.max_length": "cutoff_len max_seq_length max_seq_len model_max_length seq_length "
    "seq_len block_size max_tokens_per_sample",
    "data.max_pixels": "image_max_pixels",
    "data.min_pixels": "image_min_pixels",
    "data.video_fps": "fps",
    "data.video_max_frames": "video_maxlen fps_max_frames max_frames nframes",
    "data.video_min_frames": "fps_min_frames min_frames",
    "data.packing": "neat_packing padding_free pack greedy_intokens truncate_packing",
    "data.num_workers": "dataloader_num_workers num_workers_per_gpu preprocessing_num_workers "
    "dataset_num_proc",
    "data.prefetch_batches": "dataloader_prefetch_factor prefetch_factor",
    "data.pin_memory": "dataloader_pin_memory",
    "data.image_transforms": "image_augmentation augmentation image_aug",
    "parallel.dp_degree": "data_parallel_size data_parallel_degree dp_size dp",
    "parallel.mp_degree": "tensor_parallel_degree tensor_parallel_size tp_degree tp_size tp mp "
    "tensor_model_parallel_size",
    "parallel.pp_degree": "pipeline_parallel_degree pipeline_parallel_size pp_size pp "
    "pipeline_model_parallel_size",
    "parallel.ep_degree": "expert_parallel_degree expert_parallel_size expert_model_parallel_size "
    "ep_size ep",
    "parallel.cp_degree": "context_parallel_degree context_parallel_size cp_size cp "
    "sequence_parallel_size ulysses_degree",
    "parallel.cp_attention=ulysses": "cp_comm_type ulysses_size",
    "parallel.expert_capacity_factor": "moe_expert_capacity_factor expert_capacity_factor "
    "moe_capacity_factor capacity_factor",
    "parallel.sharding_degree": "sharding_parallel_degree sharding_parallel_size sharding_size",
    "parallel.sharding_stage": "sharding deepspeed zero_stage zero fsdp fsdp_config",
    "parallel.num_virtual_stages": "virtual_pp_degree vpp "
    "virtual_pipeline_model_parallel_size",
    "parallel.timeout_s": "ddp_timeout",
    "train.objective": "stage",
    "train.objective=preference": "rlhf_type",
    "preference.loss_type": "pref_loss",
    "preference.beta": "pref_beta",
    "preference.rpo_alpha": "pref_ftx sft_loss_ratio",
    "preference.ref_model": "reference_model ref_model_name_or_path",
    "preference.precompute_ref_log_probs": "precompute_ref_logps",
    "train.objective=grpo": "adv_estimator",
    "grpo.rewards": "reward_funcs reward_func",
    "grpo.num_generations": "rollout_n",
    "grpo.max_completion_length": "max_response_length response_length",
    "grpo.mask_truncated_completions": "overlong_filter",
    "train.output_dir": "output output_path save_dir logging_dir",
    "train.max_steps": "steps num_steps total_steps max_iterations train_iters num_training_steps",
    "train.num_train_epochs": "epochs epoch num_epochs max_epochs n_epochs",
    "train.per_device_train_batch_size": "batch_size train_batch_size micro_batch_size bs "
    "per_gpu_train_batch_size micro_train_batch_size packing_size",
    "train.per_device_eval_batch_size": "eval_batch_size val_batch_size per_gpu_eval_batch_size",
    "train.gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation_steps "
    "grad_accumulation_steps accumulate_steps",
    "train.learning_rate": "lr optimizer_lr peak_lr base_lr max_lr",
    "train.part_learning_rates": "vit_lr aligner_lr llm_lr vision_lr merger_lr "
    "optimizer_lr_backbone",
    "train.lr_scheduler_type": "lr_scheduler scheduler scheduler_type lr_decay_style",
    "train.decay_steps": "num_decay_steps scheduler_decay_steps lr_decay_iters",
    "train.warmup_steps": "num_warmup_steps warmup scheduler_warmup_steps lr_warmup_iters",
    "train.warmup_ratio": "lr_warmup_fraction warmup_fraction warmup_proportion",
    "train.min_lr_ratio": "min_lr min_lr_rate min_learning_rate lr_end scheduler_decay_lr decay_lr",
    "train.weight_decay": "wd optimizer_weight_decay",
    "train.adam_beta1": "beta1 betas optimizer_betas",
    "train.adam_beta2": "beta2",
    "train.adam_epsilon": "adam_eps eps epsilon optimizer_eps",
    "train.max_grad_norm": "grad_clip_norm clip_grad_norm gradient_clipping grad_clip clip_grad "
    "optimizer_grad_clip_norm gradient_clip_val",
    "train.ema": "ema_decay use_ema ema_model",
    "train.seed": "data_seed random_seed",
    "train.recompute=full": "gradient_checkpointing activation_checkpointing use_recompute "
    "recompute_granularity recompute_method enable_gradient_checkpointing",
    "train.recompute=attention": "recompute_modules selective_recompute",
    "train.recompute_num_layers": "activation_checkpoint_num_layers num_recompute_layers",
    "train.deterministic": "full_determinism cudnn_deterministic",
    "train.tf32": "allow_tf32",
    "train.eval_steps": "eval_freq eval_interval evaluation_steps eval_strategy "
    "evaluation_strategy",
    "train.eval": "predict_with_generate compute_metrics",
    "train.eval.max_new_tokens": "generation_max_length",
    "train.eval.num_samples": "max_eval_samples eval_limit val_limit",
    "train.best.metric": "metric_for_best_model best_metric monitor",
    "train.best.mode": "greater_is_better",
    "train.best.load_at_end": "load_best_model_at_end load_best_at_end load_best_model",
    "train.best.patience": "early_stopping_patience early_stop_patience early_stopping",
    "train.best.min_delta": "early_stopping_threshold early_stopping_min_delta",
    "train.save_steps": "save_freq save_interval checkpoint_steps save_strategy",
    "train.save_total_limit": "max_checkpoints keep_checkpoints",
    "train.resume_from_checkpoint=auto": "resume resume_from auto_resume",
    "logging.logging_steps": "log_freq log_steps log_interval log_every",
    "logging.progress_bar": "disable_tqdm tqdm",
    "logging.report_to": "wandb tensorboard visualdl swanlab use_swanlab logger log_with",
}  # fmt: skip
# Names that have no setting, by what is said of them.
NOT_NEEDED = {
    "the chat template is the one in the folder of model.pretrained or data.processor": "template "
    "template_backend chat_template",
    "images are prepared as the folder's preprocessor_config.json says": "sft_replace_ids "
    "sft_image_normalize sft_image_rescale image_dtype use_pic_id",
    "the device decides which kernels run": "use_flash_attention use_sparse_flash_attn "
    "_attn_implementation attn_impl flash_attn",
    "every folder is written in HF's format, with the files of its processor": "save_to_hf "
    "unified_checkpoint unified_checkpoint_config save_checkpoint_format load_checkpoint_format "
    "copy_custom_file_list",
    "an epoch is all rows, and train.num_train_epochs counts them": "num_samples_per_epoch "
    "num_samples_each_epoch max_estimate_samples",
    "paddle-vl train trains, and evaluates where data.eval is set": "do_train do_eval multimodal",
}
_REASONS = {name: reason for reason, names in NOT_NEEDED.items() for name in names.split()}
_SETTINGS = {name: setting for setting, names in PEERS.items() for name in names.split()}
# Names of other sections are taken only if they are closer than that of a typing error.
_LIKENESS, _LIKENESS_ELSEWHERE = 0.6, 0.75


def not_needed(name: str) -> str | None:
    """Why a dotted name of another trainer has no setting; None for any other name."""
    return _REASONS.get(name.replace("-", "_").rpartition(".")[2])


def setting_for(name: str, settings: Iterable[str]) -> str | None:
    """The setting that a dotted name most likely means, as `section.name`, or with its value.

    Args:
        name: a name that is no setting, with sections or without.
        settings: dotted names of all settings that there are.

    Returns:
        None if no setting is near.
    """
    section, _, leaf = name.replace("-", "_").rpartition(".")
    settings = list(settings)
    peers = _SETTINGS.get(leaf.lower())
    if peers is not None and peers.partition("=")[0] in settings:
        return peers

    def likeness(setting: str) -> tuple[float, bool]:
        other_section, _, other = setting.rpartition(".")
        return difflib.SequenceMatcher(None, leaf, other).ratio(), section == other_section

    best = max(settings, key=likeness)
    found, is_own = likeness(best)
    return best if found >= (_LIKENESS if is_own else _LIKENESS_ELSEWHERE) else None
