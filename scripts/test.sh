#!/usr/bin/env bash
# Installs the test extra and runs the tests; arguments go to pytest.
#
#   scripts/test.sh                      everything, on two processes
#   scripts/test.sh -n 0 tests/analysis  one folder, in this process
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
use_venv test
cd "$ROOT"

# libtpu is installed for ahead-of-time compiles; jax must not look for a TPU.
export JAX_PLATFORMS=cpu
say "python -m pytest -q -n 2 --dist loadfile $*"
exec python -m pytest -q -n 2 --dist loadfile "$@"
