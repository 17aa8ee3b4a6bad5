#!/usr/bin/env bash
# Decodes held-out sentences with the shipped pair, plainly and speculatively, and
# writes the report to runs/quickstart/. Arguments go to specjax.main.
#
#   scripts/quickstart.sh
#   scripts/quickstart.sh --gin.SENTENCES=16
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
use_venv
cd "$ROOT"

# The shipped pair is sized for a CPU; JAX_PLATFORMS=tpu or cuda decodes elsewhere.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
say "python -m specjax.main --run_mode=bench --gin_file=configs/quickstart.gin $*"
exec python -m specjax.main --run_mode=bench --gin_file=configs/quickstart.gin "$@"
