#!/usr/bin/env bash
# Trains a small Qwen3-VL on images of handwritten digits, evaluates it on unseen ones, and shows how
# to ask it about your own image. A second run resumes the training, or only evaluates.
#
#   bash tools/quickstart.sh                       about five minutes of training
#   bash tools/quickstart.sh train.max_steps=300   further arguments override configs/quickstart/digits.yaml
#
# PYTHON names the interpreter for .venv (3.10 or newer; default: the first found).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
ensure_environment cpu,digits

DATA=runs/digits/data
RUN=runs/digits/run
"$VENV_PYTHON" tools/make_digits_dataset.py "$DATA"
"$VENV_PYTHON" -m paddle_vl train configs/quickstart/digits.yaml "$@"

echo
echo "== $DATA/test.jsonl: images that were in no training conversation"
"$VENV_PYTHON" -m paddle_vl evaluate "$RUN" --data "$DATA/test.jsonl" --batch-size 64 \
    --max-new-tokens 16 --show 8 --predictions "$RUN/answers.jsonl"

cat <<END

loss curve         $RUN/loss.png
metrics            $RUN/metrics.jsonl
all answers        $RUN/answers.jsonl
the model          $RUN/final

Ask it about a picture of your own, a dark digit on white paper:
  .venv/bin/paddle-vl generate --model $RUN --image my_digit.png --prompt "Which digit is this?"
END
