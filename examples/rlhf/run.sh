#!/bin/sh
# DPO and GRPO on GSM8K, from the command line: sh examples/rlhf/run.sh GSM8K_FOLDER OUTPUT_FOLDER
#
# The model is the built-in tiny one, with two million weights created on the spot, so it first learns from worked
# solutions what an answer looks like. Everything runs at stage 3 on two processes, with reentrant checkpointing; no GPU is needed.
# GSM8K_FOLDER holds train.jsonl and example_model_solutions.jsonl of https://github.com/openai/grade-school-math.
# If interrupted, run the same command again to continue.
set -eu
data=$1
out=$2
here=$(dirname "$0")
sharded="--stage 3 --nproc 2 --gradient-checkpointing --checkpointing-reentrant --save-steps 20 --save-total-limit 1 --resume auto"
mkdir -p "$out"

shardproof sft --model tiny --dataset "$data/train.jsonl" --columns query=question,response=answer \
  --max-length 160 --per-device-batch-size 4 --max-steps 250 --learning-rate 3e-3 $sharded --output-dir "$out/sft"

python "$here/pairs.py" "$data/example_model_solutions.jsonl" > "$out/pairs.jsonl"
shardproof rlhf --rlhf-type dpo --model "$out/sft/model" --dataset "$out/pairs.jsonl" --val-split 0.1 \
  --max-length 256 --per-device-batch-size 4 --max-steps 60 --learning-rate 1e-4 $sharded --output-dir "$out/dpo"

shardproof rlhf --rlhf-type grpo --model "$out/sft/model" --dataset "$data/train.jsonl" \
  --columns query=question,response=answer --reward-funcs format accuracy --reward-weights 1 1 \
  --num-generations 8 --per-device-batch-size 8 --max-length 100 --max-completion-length 80 --max-steps 40 \
  --learning-rate 3e-4 --lr-scheduler constant --beta 0.02 $sharded --output-dir "$out/grpo"
