# The examples on the command pages. They run unchanged, from top to bottom, without a GPU or a download, as
# tests/cli/test_examples.py does. The lines below a command's name belong to that command.

# demo
shardproof demo --max-steps 20 --output-dir runs/demo

# sft
shardproof sft --model tiny --dataset stdlib#200 --stage 3 --nproc 2 --max-steps 6 --save-steps 3 --output-dir runs/first
shardproof sft --model tiny --dataset stdlib#200 --stage 2 --max-steps 8 --global-batch-size 4 --save-steps 3 \
    --output-dir runs/first --resume auto

# infer
shardproof infer runs/first --prompt "What does len do?" --max-new-tokens 20

# rlhf
shardproof rlhf --rlhf-type grpo --model runs/first/model --dataset stdlib#8 --reward-funcs length --num-generations 4 \
    --per-device-batch-size 4 --max-completion-length 16 --max-steps 2 --stage 3 --nproc 2 --output-dir runs/grpo

# plan
shardproof plan --model runs/first/model --gpus 2 --gpu-memory 16 --max-length 512

# doctor
shardproof doctor --model runs/first/model --dataset stdlib#200 --stage 3 --nproc 2

# verify
shardproof verify --model runs/first/model --dataset stdlib#50 --stage 3 --nproc 2 --steps 2

# report
shardproof report runs/first runs/demo --output compare.html

# watch
shardproof watch runs/first --port 7007

# explain
shardproof explain "RuntimeError: 'weight' must be 2-D"

# export
shardproof export runs/first exported --dtype bf16

# models
shardproof models
shardproof models qwen2_5_omni

# data
shardproof data show --model runs/first/model --dataset stdlib#200 --rows 1

# convert
shardproof convert fsdp/step-500 runs/moved/step-500

# submit
shardproof submit slurm --nodes 2 --nproc 8 --time 12:00:00 --output job.sh -- sft --model /data/model \
    --dataset /data/train.jsonl --output-dir /data/run --save-steps 100 --resume auto
shardproof submit k8s --nodes 2 --nproc 8 --image registry/team/shardproof:1 --volume data=/data -- sft \
    --model /data/model --dataset /data/train.jsonl --output-dir /data/run

# swift
shardproof swift "swift sft --model ./Qwen3-0.6B --dataset train.jsonl --deepspeed zero3 --max_length 2048"

# cases
shardproof cases --case unused_parameters --stages 3

# completion
shardproof completion bash > shardproof.bash

# env
shardproof env
