#!/usr/bin/env bash
# Makes .venv with everything in it: torch and vLLM for the hardware found, the packages (editable), development tools.
# Run again it ends at once, unless one of its inputs has changed. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  echo "set-up: $*" >&2
  exit 1
}

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if suits "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "no Python 3.11 to 3.14 found (tried ${PYTHON:-python3, python3.11 to python3.14}). Install one, with its venv" \
    "module, or name one: make setup PYTHON=/path/to/python3.12"
}

make_venv() { # creates .venv and sets $uv
  echo "set-up: creating .venv with $("$python" --version) ($python)"
  rm -rf .venv
  if uv --version >/dev/null 2>&1; then
    uv=uv
    uv venv --quiet --python "$python" .venv
    return
  fi
  "$python" -m venv .venv || die "$python cannot create virtual environments. Install its venv module" \
    "(on Debian and Ubuntu: apt install python3-venv) or uv, then run again."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt uv ||
    die "pip could not install uv. Check the network, or name a mirror with PIP_INDEX_URL."
  uv=.venv/bin/uv
}

install_torch_cpu() { # the configured sources first, then PyTorch's own index, for torch alone
  local torch first
  torch="$(grep '^torch==' requirements/constraints-cpu.txt)"
  first="$("$uv" pip install --python .venv/bin/python --no-deps "$torch" 2>&1)" ||
    UV_INDEX='' "$uv" pip install --python .venv/bin/python --no-deps "$torch" \
      --default-index https://download.pytorch.org/whl/cpu || {
    echo "From the configured sources: $first" >&2
    die "found $torch neither in the configured sources nor in PyTorch's CPU index. Check the network, or put its" \
      "wheel in a folder and name that with PIP_FIND_LINKS."
  }
}

exec 9<scripts/setup.sh # two runs at once: the second waits, and finds it done
if command -v flock >/dev/null; then flock 9; fi

hardware=cpu
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then hardware=gpu; fi
inputs="$(cat scripts/*.sh requirements/*.txt packages/*/pyproject.toml packages/*/hatch_build.py)"
key="$(printf '%s\n' "$hardware" "$PWD" "${PYTHON:-}" "$inputs" | cksum)"
stamp=.venv/set-up
if [ "$(cat $stamp 2>/dev/null)" = "$key" ] && suits .venv/bin/python; then exit 0; fi

python="$(find_python)"
make_venv
source scripts/pip_settings.sh
# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would compile all that it imports: vLLM then
# takes 26 s to import instead of 9.
export UV_COMPILE_BYTECODE=1
options=(-c requirements/constraints.txt -c "requirements/constraints-$hardware.txt")
if [ $hardware = cpu ]; then
  options+=(--override requirements/overrides-cpu.txt)
  install_torch_cpu
fi
echo "set-up: installing for the ${hardware^^} (about 4 GB for the CPU, 12 GB for a GPU)"
"$uv" pip install --python .venv/bin/python "${options[@]}" -r requirements/dev.txt \
  -e packages/skyrl-gym -e "packages/skyrl-trainer[$hardware]" ||
  die "an installation failed; the lines above say which. Check the network and the disk's free space, or name a" \
    "mirror with PIP_INDEX_URL, then run again: what was downloaded is kept."
echo "$key" >$stamp
echo "set-up: done"
