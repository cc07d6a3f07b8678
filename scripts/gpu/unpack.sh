#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On the GPU machine, from the checkout's root: takes in carried parts and prepares the environment.
#
#   . scripts/gpu/unpack.sh [.gpu-pack/part-0 ...]
#
# Sourced, so that the environment is set. Parts may come in several calls; what is complete is
# installed, the rest waits. Called without parts it only refreshes our own code.
STAGE="${SPECPLUG_STAGE:-/tmp/specplug-stage}"
mkdir -p "$STAGE/pieces" "$STAGE/files" "$STAGE/site" "$STAGE/app"
for part in "$@"; do
  cp "$part"/* "$STAGE/pieces/" || echo "unpack: $part is not here" >&2
done
python3 - "$STAGE" <<'PY'
import hashlib, json, lzma, pathlib, sys

stage = pathlib.Path(sys.argv[1])
path = stage / "pieces" / "manifest.json"
waiting = []
for name, entry in json.loads(path.read_text()).items() if path.exists() else ():
    target = stage / "files" / name
    if target.exists():
        continue
    pieces = [stage / "pieces" / piece for piece in entry["pieces"]]
    if not all(piece.exists() for piece in pieces):
        waiting.append(name)
        continue
    data = b"".join(piece.read_bytes() for piece in pieces)
    if entry["xz"]:
        data = lzma.decompress(data)
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        print(f"unpack: {name} is damaged", file=sys.stderr)
        continue
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    for piece in pieces:
        piece.unlink()
print(f"unpack: {len(waiting)} files still to come {waiting[:3]}")
PY
for archive in "$STAGE"/files/archives/*.tar.xz; do
  [ -f "$archive" ] && [ ! -f "$archive.done" ] && tar -C "$STAGE/site" -xJf "$archive" &&
    touch "$archive.done"
done
# All at once: pip takes a second to start.
new=()
for wheel in "$STAGE"/files/wheels/*.whl "$STAGE"/files/find-links/gguf-*.whl; do
  [ -f "$wheel" ] && [ ! -f "$wheel.done" ] && new+=("$wheel")
done
[ ${#new[@]} -gt 0 ] &&
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$STAGE/site" "${new[@]}" &&
  touch "${new[@]/%/.done}"
# Our code as a package: kernels lie apart in the checkout, which is a copy here, and vLLM finds
# plugins by metadata.
ln -sfn ../kernels/src vllm_specplug/kernels
[ -d "$STAGE/files/kernels" ] && cp -r "$STAGE"/files/kernels/. kernels/src/
[ -d "$STAGE/files/heads" ] && mkdir -p heads && cp -rn "$STAGE"/files/heads/. heads/
mkdir -p "$STAGE/app/vllm_specplug-0.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm-specplug\nVersion: 0\n' >"$STAGE/app/vllm_specplug-0.dist-info/METADATA"
printf '[vllm.general_plugins]\nspecplug = vllm_specplug.plugin:register\n' >"$STAGE/app/vllm_specplug-0.dist-info/entry_points.txt"
# Not sys.path: vLLM starts processes of its own.
export PYTHONPATH="$PWD:$STAGE/app:$STAGE/site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PIP_NO_INDEX=1 PIP_FIND_LINKS="$STAGE/files/find-links" VLLM_NO_USAGE_STATS=1
# The slim vLLM is without FlashInfer, which it would sample with.
export VLLM_USE_FLASHINFER_SAMPLER=0
export XDG_CACHE_HOME="$STAGE/cache" TRITON_CACHE_DIR="$STAGE/triton"
