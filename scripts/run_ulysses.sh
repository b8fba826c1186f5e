#!/usr/bin/env bash
# Supervised fine-tuning with Ulysses sequence parallel and Muon; --help says how.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'HELP'
Usage: scripts/run_ulysses.sh [--flag value ...] [-- word ...]

Trains with sequences shared among ranks (Ulysses) and Muon. The run itself refuses what cannot work before its first step.
Each flag can be given as an environment variable; flags win. The words after -- replace keys of CONFIG.

  --engine   ENGINE    hf: transformers' Trainer with DeepSpeed's sequence parallel; words are --key value  (default)
                       llamafactory: LLaMA-Factory v1 with FSDP2, on CUDA; words are key=value
  --nproc    NPROC     processes of this node                                 (default: its GPUs; without any, 2)
  --nnodes   NNODES    nodes                                                                         (default: 1)
  --sp-size  SP_SIZE   hf: ranks that share a sequence (default: NPROC * NNODES); llamafactory: cp_size in CONFIG
  --config   CONFIG    YAML file                      (default for hf: examples/yaml/trainer_qwen3_ulysses.yaml)
  --dry-run            print the command, and do not run it

Also read: NODE_RANK (0), MASTER_ADDR (127.0.0.1) and MASTER_PORT (29500) for several nodes, PYTHON (python), TRAIN
(examples/train.py). Paths in CONFIG are relative to the current folder. In this repository, on 8 GPUs, and on the CPU:

  NPROC=8 scripts/run_ulysses.sh -- --data_path my_pairs.jsonl
  CUDA_VISIBLE_DEVICES= scripts/run_ulysses.sh --nproc 2 -- --use_cpu --bf16 false --attn_implementation sdpa \
    --block_size 512 --model_name_or_path Qwen/Qwen3-0.6B --data_path my_pairs.jsonl
HELP
}
fail() { echo "run_ulysses.sh: $*" >&2; exit 2; }

while (($#)); do
  case $1 in
    -h | --help) usage; exit ;;
    --dry-run) dry_run=1; shift; continue ;;
    --) shift; break ;;
    --engine | --nproc | --nnodes | --sp-size | --config) (($# > 1)) || fail "$1 needs a value" ;;
    *) fail "unknown: $1. See --help; keys of CONFIG follow --" ;;
  esac
  name=${1#--}; name=${name//-/_}; declare "${name^^}=$2"; shift 2
done
ENGINE=${ENGINE:-hf} PYTHON=${PYTHON:-python} NNODES=${NNODES:-1}
[[ $ENGINE =~ ^(hf|llamafactory)$ ]] || fail "ENGINE=$ENGINE: valid are hf, llamafactory"
[[ $ENGINE != hf ]] || CONFIG=${CONFIG:-$root/examples/yaml/trainer_qwen3_ulysses.yaml}
[[ -f ${CONFIG:-} ]] || fail "CONFIG=${CONFIG:-} is not a file"
NPROC=${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')} || fail "$PYTHON has no torch: set PYTHON"
[[ $NPROC.$NNODES.${SP_SIZE:-1} =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "NPROC, NNODES and SP_SIZE are numbers"
size=${SP_SIZE:-$((NPROC * NNODES))}
if [[ $ENGINE == hf ]]; then
  ((size > 1 && NPROC * NNODES % size == 0)) || fail "SP_SIZE=$size is not above 1, or does not divide NPROC * NNODES"
  nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}")
  ((NNODES > 1)) && nodes+=(--master-port "${MASTER_PORT:-29500}") || nodes=(--standalone)
  command=(env ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_SP_BACKEND=deepspeed "PARALLELISM_CONFIG_SP_SIZE=$size"
    "$PYTHON" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "$NPROC" "${TRAIN:-$root/examples/train.py}" "$CONFIG" "$@")
else
  [[ ! ${SP_SIZE:-} ]] || fail "SP_SIZE is for ENGINE=hf: write cp_size into CONFIG"
  command=(env USE_V1=1 FORCE_TORCHRUN=1 "NNODES=$NNODES" "NPROC_PER_NODE=$NPROC" llamafactory-cli sft "$CONFIG" "$@")
fi
[[ ! ${dry_run:-} ]] || { printf '%q ' "${command[@]}"; echo; exit; }
exec "${command[@]}"
