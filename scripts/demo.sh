#!/usr/bin/env bash
# Set up an environment and do the main job: train a small GPT on real text over two ranks, with NVFP4 weights and then
# with bfloat16 ones (float32 on a CPU without instructions for bfloat16), on GPUs where there are two. Arguments go to
# `python -m examples.training`. Leaves metrics, a summary and the picture of both curves in runs/demo, and ends with DEMO PASSED, or with
# DEMO FAILED and a status other than 0. Where there is no GPU it leaves CUDA out of the extension, unless that is built
# already or ZEROFP4_CUDA is 1.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/verdict.sh"
verdict DEMO
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
if [[ -z ${ZEROFP4_CUDA-} ]] && ! nvidia-smi -L >/dev/null 2>&1 && ! compgen -G "$ROOT/zerofp4/_C.*.so" >/dev/null; then
    say "no GPU: the extension is built for the CPU alone (with ZEROFP4_CUDA=1 for GPUs, too)"
    export ZEROFP4_CUDA=0
fi
setup_environment train
cd "$ROOT"

read -r cores gpus < <("$PYTHON" -c 'import os, torch; print(len(os.sched_getaffinity(0)), torch.cuda.device_count())')
ranks=2
if ((gpus == 1)); then
    say "one GPU, so one rank, because NCCL needs a GPU for each; with CUDA_VISIBLE_DEVICES= two ranks use the CPU"
    ranks=1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
"$PYTHON" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node $ranks \
    -m examples.training --weights both --out runs/demo --overwrite "$@"
passed
