#!/usr/bin/env bash
# ms-swift, full supervised fine-tuning of Qwen3-0.6B with Muon, on one GPU or with DDP on several:
#   examples/programs/ms_swift_qwen3_sft.sh
#   NPROC_PER_NODE=8 examples/programs/ms_swift_qwen3_sft.sh --deepspeed zero3
# `--optim muon` is hf_muon; `--optimizer muon` would be ms-swift's own Muon, and win. Arguments are passed on:
# --resume_from_checkpoint saves/.../v0-.../checkpoint-500 resumes. Tried with ms-swift 4.6; not run in this repository's tests.
set -euo pipefail

swift sft \
  --model Qwen/Qwen3-0.6B \
  --use_hf true \
  --tuner_type full \
  --torch_dtype bfloat16 \
  --dataset 'HuggingFaceH4/no_robots' \
  --max_length 2048 \
  --optim muon \
  --learning_rate 2e-5 \
  --weight_decay 0 \
  --adam_beta2 0.999 \
  --lr_scheduler_type cosine \
  --warmup_ratio 0.03 \
  --per_device_train_batch_size 4 \
  --gradient_accumulation_steps 4 \
  --num_train_epochs 1 \
  --logging_steps 10 \
  --save_steps 500 \
  --report_to none \
  --output_dir saves/qwen3-0.6b/ms_swift/sft_muon \
  "$@"
