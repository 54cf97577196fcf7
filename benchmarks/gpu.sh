#!/bin/sh
# Every figure that needs a GPU, after the tests of the kernels on it:
#
#     sh benchmarks/gpu.sh [OUT]        (about ten minutes on an H100; OUT: benchmarks/results)
#
# PYTHON names the interpreter (default: python3); nothing is installed. From a checkout it runs without
# installation too: the packages are put on PYTHONPATH. PARTS chooses among: tests tune kernels ttft-8k ttft-32k.
set -eu
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
parts=${PARTS:-tests tune kernels ttft-8k ttft-32k}
export PYTHONPATH=".:kernels:integrations${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
unset TRITON_INTERPRET
mkdir -p "$out"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "no GPU that torch can use here" >&2
    exit 1
}
speed() {
    "$python" -m ragcachekit bench ttft --shape llama-3.1-8b --dtype bfloat16 --device cuda --chunk-tokens 512 \
        --policies full,lego:16,random:0.15,query:0.15,reuse "$@"
}
for part in $parts; do
    echo "== $part"
    case $part in
    tests) "$python" -m pytest -q -p no:cacheprovider tests/kernels ;;
    tune) "$python" -m ragcachekit bench kernels --tune "$out/kernel-tuning.json" ;;
    kernels) "$python" -m ragcachekit bench kernels --runs 20 --json "$out/kernels-h100.json" ;;
    ttft-8k)
        speed --prompt-tokens 8192 --tiers gpu,host --runs 7 \
            --json "$out/ttft-h100-8k.json" --plot "$out/ttft-h100-8k.png"
        ;;
    ttft-32k)
        speed --prompt-tokens 32768 --tiers gpu,host --runs 5 \
            --json "$out/ttft-h100-32k.json" --plot "$out/ttft-h100-32k.png"
        ;;
    *)
        echo "no part called $part" >&2
        exit 2
        ;;
    esac
done
