#!/bin/sh
# Which digit is this? Images, audio and words in one file: sh examples/digits/run.sh OUTPUT_FOLDER [FSDD_FOLDER]
#
# A small Qwen2.5-Omni trains on two processes at stage 3, a small MiniCPM-V (without audio) on four; both are created
# on the spot, and no GPU is needed. FSDD_FOLDER holds the recordings of https://github.com/Jakobovski/free-spoken-digit-dataset;
# without it there are only images and words. Needs scikit-learn and 'shardproof[train,media]'. If interrupted, run the
# same command again to continue.
set -eu
out=$1
sounds=${2:+--sounds $2}
here=$(dirname "$0")
learn="--global-batch-size 32 --learning-rate 2e-3 --stage 3 --logging-steps 10 --save-steps 50 --save-total-limit 1 --resume auto"

python "$here/digits.py" data "$out/omni" --scans 900 $sounds
python "$here/digits.py" model "$out/omni" --kind omni
shardproof sft --model "$out/omni/model" --dataset "$out/omni/train.jsonl" --enable-audio-output no \
  --per-device-batch-size 16 --max-steps 350 --nproc 2 $learn --output-dir "$out/omni/run"
python "$here/digits.py" score "$out/omni/run" "$out/omni/test.jsonl"

python "$here/digits.py" data "$out/minicpm" --scans 900
python "$here/digits.py" model "$out/minicpm" --kind minicpm
shardproof sft --model "$out/minicpm/model" --dataset "$out/minicpm/train.jsonl" \
  --per-device-batch-size 8 --max-steps 250 --nproc 4 --workers 0 $learn --output-dir "$out/minicpm/run"
python "$here/digits.py" score "$out/minicpm/run" "$out/minicpm/test.jsonl"
