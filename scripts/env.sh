# shellcheck shell=bash
# Sourced by the other scripts: where things are, and how this project speaks.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

# Several GB, so it lives outside the repository and serves every checkout with the same requirements.
REQUIREMENTS=$ROOT/python_client/requirements-dev.txt
CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/dmuon
VENV=$CACHE/venv-$(sha256sum "$REQUIREMENTS" | cut -c1-12)
BUILD=$ROOT/build/dev

# Object files are shared between checkouts and presets.
export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1
export PATH=$VENV/bin:$BUILD/bin:$PATH
export PYTHONPATH=$BUILD/python PYTHONDONTWRITEBYTECODE=1

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*"; }
die() {
  say "$1" >&2
  exit "${2:-1}"
}

# install_packages NAME...: those of Debian's packages that are not there.
install_packages() {
  local missing
  missing=$(comm -23 <(printf '%s\n' "$@" | sort) \
    <(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null |
      sed -n 's/^installed //p' | sort))
  [ -n "$missing" ] || return 0
  local names
  names=$(echo "$missing" | tr '\n' ' ')
  command -v apt-get >/dev/null || die "this is not a Debian; please install what corresponds to: $names"
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "neither root nor sudo; please have these packages installed: $names"
    as_root=(sudo)
  fi
  say "installing Debian packages: $names"
  "${as_root[@]}" apt-get update -q
  # shellcheck disable=SC2086  # the names are words
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends -o Dpkg::Use-Pty=0 $names
}

# make_venv FOLDER REQUIREMENTS. The marker is the last thing written, so an interrupted installation is begun again.
make_venv() {
  rm -rf "$1"
  python3 -m venv "$1"
  "$1/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r "$2"
  touch "$1/.ready"
}

# configure PRESET [cmake arguments]: makes build/PRESET once; later changes of a CMakeLists.txt are ninja's business.
configure() {
  local preset=$1 folder=$ROOT/build/$1
  shift
  # An empty build/ or another Python environment: (re)configure.
  [ -f "$folder/build.ninja" ] && grep -qF "$VENV/bin/python" "$folder/CMakeCache.txt" && return
  say "configuring build/$preset"
  mkdir -p "$folder"
  cmake --preset "$preset" "-DPython_EXECUTABLE=$VENV/bin/python" "$@" >"$folder/configure.log" 2>&1 || {
    cat "$folder/configure.log" >&2
    die "cmake could not configure build/$preset"
  }
}

# build PRESET [targets]: silent when there is nothing to do.
build() {
  local preset=$1
  shift
  cmake --build "$ROOT/build/$preset" ${1:+--target "$@"} -- -j"$(nproc)" | sed -u '/^ninja: no work to do/d; /link_package.cmake$/d'
}
