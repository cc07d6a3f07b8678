#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves SmolLM2 with draft trees, asks one question with curl, shows the tree counters, stops.
# Needs the environment of `make setup`: PATH="$PWD/.venv/bin:$PATH" examples/serve_and_chat.sh
set -euo pipefail

export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" HF_HUB_OFFLINE=1
PORT="${PORT:-8000}"
MODEL="$(specplug target smollm2)"

vllm serve "$MODEL" --served-model-name smollm2 --port "$PORT" --max-model-len 2048 \
  --enforce-eager --speculative-config "$(specplug config smollm2 jetspec)" &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" || true' EXIT

until curl -sf "http://127.0.0.1:$PORT/health" >/dev/null; do
  kill -0 "$server" || exit 1
  sleep 1
done

curl -s "http://127.0.0.1:$PORT/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "smollm2", "temperature": 0, "max_tokens": 96,
  "messages": [{"role": "user", "content": "Explain what a tree is in computer science."}]
}'
echo
curl -s "http://127.0.0.1:$PORT/metrics" | grep -E '^(specplug:|vllm:spec_decode).*_total'
