#!/bin/sh
# Builds wheel and sdist, checks both, and runs every program of examples/ with nothing but the wheel and its
# dependencies. BIN holds build, twine and check-wheel-contents; PYTHON makes the empty environment. Packages are
# downloaded, and the sample model is made where it is not there yet.
set -eu
cd "$(dirname "$0")/../.."
BIN=${BIN:-.venv/bin} PYTHON=${PYTHON:-python3}
rm -rf dist && "$BIN/python" -m build --outdir dist
"$BIN/twine" check --strict dist/*
"$BIN/check-wheel-contents" dist/*.whl
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
"$PYTHON" -m venv "$work/venv"
alone="$work/venv/bin/python"
"$alone" -m pip install -q --disable-pip-version-check -c constraints.txt --extra-index-url \
    https://download.pytorch.org/whl/cpu torch
"$alone" -m pip install -q --disable-pip-version-check -c constraints.txt \
    "$(ls "$PWD"/dist/*.whl)[demo,llama-index]"
cp -r examples "$work/examples" && cd "$work"  # nothing of the clone can be imported from here
"$alone" -c 'import ragcachekit; assert "site-packages" in ragcachekit.__file__, ragcachekit.__file__'
"$alone" -m ragcachekit --version
for program in langchain_rag llama_index_rag multi_tenant offline_precompute own_policy chat_with_memory; do
    echo "$program" && "$alone" "examples/$program.py"
done
