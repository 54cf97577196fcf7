#!/bin/sh
# Every figure that needs a GPU:
#
#     sh benchmarks/gpu.sh [OUT]        (OUT: benchmarks/results)
#
# PYTHON names the interpreter (default: python3). It needs what pyproject.toml asks for, pytest and hypothesis;
# nothing is installed, the packages of this checkout are put on PYTHONPATH. PARTS chooses among
#     smoke     a small model through kernels, copies and tiers: run it first, it takes a minute
#     kernels   every kernel beside what the GPU can do and beside torch's own attentions
#     ttft-8k ttft-32k   time to the first token, Llama 3.1 8B's shape
#     tests     all tests of the kernels, compiled: many minutes, less with pytest-xdist
# A part that fails does not keep the next from running; the exit status says that one did.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
parts=${PARTS:-smoke kernels ttft-8k ttft-32k tests}
export PYTHONPATH=".:kernels:integrations:tests/kits${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
unset TRITON_INTERPRET
mkdir -p "$out"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "no GPU that torch can use here" >&2
    exit 1
}
workers=
"$python" -c 'import xdist' 2>/dev/null && workers="-n 8"

checked() {
    "$python" -m pytest -q -c /dev/null --rootdir . -m 'not soak' "$@"
}
speed() {
    "$python" -m benchmarks ttft --shape llama-3.1-8b --dtype bfloat16 --device cuda --chunk-tokens 512 \
        --tiers gpu,host --policies full,sensitive:0.1,lego:16,query:0.15,reuse "$@"
}
run() {
    case $1 in
    smoke) checked tests/forward/test_on_a_gpu.py tests/forward/test_placing.py \
        tests/model/test_extract.py -k gpu ;;
    kernels)
        "$python" -m benchmarks kernels --runs 20 --json "$out/kernels-gpu.json" ||
            "$python" -m benchmarks kernels --runs 20 --no-graphs --json "$out/kernels-gpu.json"
        ;;
    ttft-8k) speed --prompt-tokens 8192 --runs 7 --json "$out/ttft-gpu-8k.json" --plot "$out/ttft-gpu-8k.png" ;;
    ttft-32k) speed --prompt-tokens 32768 --runs 5 --json "$out/ttft-gpu-32k.json" --plot "$out/ttft-gpu-32k.png" ;;
    tests) checked $workers tests/kernels ;;
    *)
        echo "no part called $1" >&2
        return 2
        ;;
    esac
}

status=0
for part in $parts; do
    echo "== $part"
    run "$part" || { status=$?; echo "== $part failed" >&2; }
done
exit $status
