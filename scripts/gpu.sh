#!/bin/bash
# Runs the tests or the figures of GPUs on a machine that has one, without a network and with that
# machine's torch, from what `make gpu-wheels` has laid into build/carry:
#   scripts/gpu.sh tests [options of pytest]
#   scripts/gpu.sh figures [options of benchmarks/figures/gpu_figures.py]
#   scripts/gpu.sh plan-figures [options of benchmarks/figures/plan_figures.py]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
site=$PWD/build/gpu-site
task=$1
shift

if ! compgen -G 'build/carry/tensorferry-*.whl' >/dev/null; then
  echo "there is no wheel in build/carry: run 'make gpu-wheels' where there is a network" >&2
  exit 1
fi
rm -rf "$site"
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$site" \
  build/carry/*.whl
export PYTHONPATH=$site PATH=$site/bin:$PATH TENSORFERRY_PROFILES=
if [ "$task" = tests ]; then
  exec "$python" -m pytest -ra --basetemp=build/gpu-tmp "$@" tests/gpu
fi
if [ "$task" = plan-figures ]; then
  exec "$python" -m benchmarks.figures.plan_figures --sections gpu \
    --program "$site/bin/tensorferry" "$@"
fi
exec "$python" -m benchmarks.figures.gpu_figures "$@"
