#!/usr/bin/env bash
# Makes .venv with everything in it: torch and vLLM for the hardware found, the packages (editable), development tools.
# Run again it ends at once, unless one of its inputs has changed. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  echo "set-up: $*" >&2
  exit 1
}

ALONE="The environments alone work everywhere: python -m pip install packages/skyrl-gym"
NETWORK="Check the network, set HTTPS_PROXY behind a proxy, or name a mirror with PIP_INDEX_URL."

check_machine() { # what would fail later, and less plainly
  local free need=4
  case "$(uname -s)" in
    Linux) ;;
    Darwin) die "vLLM and the sandboxes need Linux, this is macOS. Use a container (docker/README.md). $ALONE" ;;
    *) die "vLLM and the sandboxes need Linux, this is $(uname -s). On Windows use WSL 2. $ALONE" ;;
  esac
  if [ $hardware = gpu ]; then need=12; fi
  free="$(df -Pk . 2>/dev/null | awk 'NR == 2 { print int($4 / 1024 / 1024) }')"
  if [ ! -e .venv ] && [ "${free:-$need}" -lt $need ]; then
    die "$PWD has $free GB of free space, and the packages for this machine take $need GB. Free some, or put the" \
      "checkout on another disk. $ALONE"
  fi
  command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null ||
    die "there is no C compiler, and some packages have to be compiled. Install one (on Debian and Ubuntu: apt install" \
      "build-essential), or name one in CC. $ALONE"
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
  die "no Python 3.11 to 3.14 found (tried ${PYTHON:-python3, python3.11 to python3.14};" \
    "$("${PYTHON:-python3}" --version 2>/dev/null || echo "${PYTHON:-python3} does not run") is not one of these)." \
    "Install one, with its venv module, or name one: make setup PYTHON=/path/to/python3.12"
}

make_venv() { # creates .venv and sets $uv
  echo "set-up: creating .venv with $("$python" --version) ($python)"
  rm -rf .venv
  if uv --version >/dev/null 2>&1; then
    uv=uv
    uv venv --quiet --seed --python "$python" .venv
    return
  fi
  "$python" -m venv .venv || die "$python cannot create virtual environments. Install its venv module" \
    "(on Debian and Ubuntu: apt install python3-venv) or uv, then run again."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt uv ||
    die "pip could not install uv. $NETWORK"
  uv=.venv/bin/uv
}

install_torch_cpu() { # the configured sources first, then PyTorch's own index, for torch alone
  local torch first
  torch="$(grep '^torch==' requirements/constraints-cpu.txt)"
  local install=("$uv" pip install --python .venv/bin/python --no-deps "$torch")
  if first="$("${install[@]}" --dry-run 2>&1)"; then
    "${install[@]}"
  else
    UV_INDEX='' "${install[@]}" --default-index https://download.pytorch.org/whl/cpu
  fi || {
    echo "From the configured sources: $first" >&2
    die "found $torch neither in the configured sources nor in PyTorch's CPU index. $NETWORK Or" \
      "put its wheel in a folder and name that with PIP_FIND_LINKS."
  }
}

exec 9<scripts/setup.sh # two runs at once: the second waits, and finds it done
if command -v flock >/dev/null; then flock 9; fi

hardware=cpu
if nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; then hardware=gpu; fi
inputs="$(cat scripts/*.sh requirements/*.txt packages/*/pyproject.toml packages/*/hatch_build.py)"
key="$(printf '%s\n' "$hardware" "$PWD" "${PYTHON:-}" "$inputs" | cksum)"
stamp=.venv/set-up
if [ "$(cat $stamp 2>/dev/null)" = "$key" ] && suits .venv/bin/python; then exit 0; fi

check_machine
python="$(find_python)"
"$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
  die "$python has no Python.h, and some packages have to be compiled. Install its headers (on Debian and Ubuntu:" \
    "apt install python3-dev). $ALONE"
echo "set-up: torch, vLLM, Ray and some 200 packages more go into .venv, for the ${hardware^^}: some two minutes where" \
  "they are cached, else as long as it takes to download them."
make_venv
source scripts/pip_settings.sh
# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would compile all that it imports: vLLM then
# takes 26 s to import instead of 9.
export UV_COMPILE_BYTECODE=1
options=(-c requirements/constraints.txt -c "requirements/constraints-$hardware.txt")
if [ $hardware = cpu ]; then
  options+=(--override requirements/overrides-cpu.txt)
  echo "set-up: 1 of 2, torch"
  install_torch_cpu
fi
echo "set-up: 2 of 2, all the rest (on disk about 4 GB for the CPU, 12 GB for a GPU)"
"$uv" pip install --python .venv/bin/python "${options[@]}" -r requirements/dev.txt \
  -e packages/skyrl-gym -e "packages/skyrl-trainer[$hardware]" ||
  die "an installation failed; the lines above say which. $NETWORK What was" \
    "downloaded is kept: run again."
echo "$key" >$stamp
echo "set-up: done"
