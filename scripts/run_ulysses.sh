#!/usr/bin/env bash
# Supervised fine-tuning with Ulysses sequence parallel and Muon; --help tells how.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'HELP'
Usage: scripts/run_ulysses.sh [--flag value ...] [-- --key value ...]

Trains with sequences shared among ranks (Ulysses) and Muon. What would train wrong is refused before it starts.
Each flag can be given as an environment variable; flags win. What follows -- replaces keys of CONFIG: --key value,
key=value, or --key alone for true.

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
Paths in CONFIG are relative to the current folder; a DeepSpeed config that is not there is taken from this repository.

On 8 GPUs, and on the CPU:

  NPROC=8 scripts/run_ulysses.sh -- --data_path my_pairs.jsonl
  scripts/run_ulysses.sh --nproc 2 --sp-size 2 -- --use_cpu --bf16 false --attn_implementation sdpa --block_size 512 \
    --model_name_or_path Qwen/Qwen3-0.6B --data_path my_pairs.jsonl
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

code=0
settings=$("$python" -m hf_muon.integrations.ulysses.launch "$engine" --nproc "${NPROC:-}" --nnodes "${NNODES:-}" \
  --sp-size "${SP_SIZE:-}" --config "$config" --root "$root" --train "${TRAIN:-}" -- "$@") || code=$?
case $code in
  0) ;;
  2 | 130) exit "$code" ;;  # it has said why; it was interrupted
  *) fail "PYTHON=$python did not run the check. Activate the environment with torch and hf_muon, or name its python in PYTHON" ;;
esac
words=()
while IFS= read -r line; do
  case $line in
    WORD=*) words+=("${line#WORD=}") ;;
    *) export "${line?}" ;;
  esac
done <<<"$settings"

if [[ $engine == hf ]]; then
  nodes=(--standalone)
  ((NNODES == 1)) || nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
  command=("$python" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "$NPROC"
    "${TRAIN:-$root/examples/train.py}" "$config" "${words[@]}")
else
  export NPROC_PER_NODE=$NPROC
  command=(llamafactory-cli sft "$config" "${words[@]}")
fi
if [[ $dry_run ]]; then
  echo "$settings"
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
