#!/bin/sh
# Builds wheel and sdist into dist/, checks both, and runs programs of examples/ with the wheel in an environment
# without this clone. BIN holds build, twine and check-wheel-contents. By default two programs run, and dependencies
# come from BIN's environment. With FULL=1 six run, and dependencies are installed anew from the package index, which
# downloads for minutes; set pip's PIP_EXTRA_INDEX_URL where that has no torch for CPUs.
set -eu
cd "$(dirname "$0")/../.."
BIN=$(cd "${BIN:-.venv/bin}" && pwd) FULL=${FULL:-} clone=$PWD
isolation=--no-isolation
"$BIN/python" -c 'import hatchling' 2>/dev/null || isolation=
rm -rf dist && "$BIN/python" -m build $isolation --outdir dist
"$BIN/twine" check --strict dist/*
"$BIN/check-wheel-contents" dist/*.whl
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
"$BIN/python" -m venv "$work/venv"
alone="$work/venv/bin/python"
pip="$alone -m pip install --quiet --disable-pip-version-check -c constraints.txt"
if [ "$FULL" ]; then
    $pip "$(ls "$clone"/dist/*.whl)[demo,llama-index]"
else
    $pip --no-deps dist/*.whl
    # Dependencies by a path file: the path files of that environment, the clone's among them, are not read.
    "$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$(echo "$work"/venv/lib/python*/site-packages)/dependencies.pth"
fi
cp -r examples "$work/examples" && cd "$work"
"$alone" -c 'import ragcachekit, sys; assert sys.prefix in ragcachekit.__file__, ragcachekit.__file__'
"$alone" -m ragcachekit --version
for program in langchain_rag llama_index_rag ${FULL:+multi_tenant offline_precompute own_policy chat_with_memory}; do
    echo "== $program" && "$alone" "examples/$program.py" --model "${MODEL:-sample}"
done
