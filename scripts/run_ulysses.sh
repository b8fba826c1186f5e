#!/usr/bin/env bash
# Supervised fine-tuning with Ulysses sequence parallel and Muon; --help tells how.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'HELP'
Usage: scripts/run_ulysses.sh [--flag value ...] [-- --key value ...]

Trains with sequences shared among ranks (Ulysses) and Muon. What would train wrong is refused before it starts.
Each flag can be given as an environment variable; flags win. What follows -- replaces keys of CONFIG.

  --engine   ENGINE    hf: transformers' Trainer with DeepSpeed's sequence parallel, on CUDA, or on the CPU with gloo
                       llamafactory: LLaMA-Factory v1 with FSDP2, on CUDA                     (default: hf)
  --nproc    NPROC     processes of this node                    (default: its GPUs; without any, SP_SIZE or 2)
  --nnodes   NNODES    nodes                                                                  (default: 1)
  --sp-size  SP_SIZE   ranks that share a sequence; divides NPROC * NNODES       (default: NPROC * NNODES)
  --config   CONFIG    YAML file               (default for hf: examples/yaml/trainer_qwen3_ulysses.yaml)
  --dry-run            check, print the command, and do not run it
  --help               this

Also read: NODE_RANK (0), MASTER_ADDR (127.0.0.1) and MASTER_PORT (29500; a free one on one node) for several nodes,
PYTHON (python), TRAIN (examples/train.py; a Trainer script of yours that takes CONFIG first).

  NPROC=8 CONFIG=examples/yaml/trainer_qwen3_ulysses.yaml scripts/run_ulysses.sh -- --data_path my_texts
  scripts/run_ulysses.sh --nproc 2 --sp-size 2 -- --use_cpu true --bf16 false
HELP
}

fail() {
  echo "run_ulysses.sh: $*" >&2
  exit 2
}

dry_run=
while (($#)); do
  case $1 in
    -h | --help) usage; exit ;;
    --dry-run) dry_run=1; shift; continue ;;
    --) shift; break ;;
    --engine | --nproc | --nnodes | --sp-size | --config) (($# > 1)) || fail "$1 needs a value" ;;
    *) fail "unknown: $1. Valid are --engine, --nproc, --nnodes, --sp-size, --config, --dry-run, --help; CONFIG's keys follow --" ;;
  esac
  name=${1#--}; name=${name//-/_}
  declare "${name^^}=$2"
  shift 2
done

engine=${ENGINE:-hf} python=${PYTHON:-python} config=${CONFIG:-}
[[ $engine != hf || $config ]] || config=$root/examples/yaml/trainer_qwen3_ulysses.yaml
[[ $config ]] || fail "CONFIG is missing: name a YAML file of LLaMA-Factory v1"

settings=$("$python" -m hf_muon.integrations.ulysses_launch "$engine" --nproc "${NPROC:-}" --nnodes "${NNODES:-}" \
  --sp-size "${SP_SIZE:-}" --config "$config" -- "$@")
while IFS='=' read -r name value; do export "$name=$value"; done <<<"$settings"

if [[ $engine == hf ]]; then
  nodes=(--standalone)
  ((NNODES == 1)) || nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
  command=("$python" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "$NPROC"
    "${TRAIN:-$root/examples/train.py}" "$config" "$@")
else
  export NPROC_PER_NODE=$NPROC
  command=(llamafactory-cli sft "$config" "$@")
fi
if [[ $dry_run ]]; then
  echo "$settings"
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
