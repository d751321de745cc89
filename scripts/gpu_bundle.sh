#!/usr/bin/env bash
# Makes gpu-bundle/, all that a machine with a GPU needs to check and measure the CUDA backend: copy the folder there and run
# its scripts/gpu_check.sh. Inside: daemon, tool, C++ trainers, the CUDA backend as it ships, their tests, their shared
# libraries, and wheels. CUDA, Python and PyTorch stay out: the machine brings them.
#
#   scripts/gpu_bundle.sh [--arch LIST] [--build FOLDER]
#     --arch LIST       CUDA architectures, as CMake writes them (default: those that ship)
#     --build FOLDER    build folder (default: build/gpu-bundle)
#
# Needs nvcc of CUDA 13 and what scripts/setup.sh needs; downloads from apt and PyPI only.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

ARCH='' FOLDER=build/gpu-bundle
while [ $# -gt 0 ]; do
  case $1 in
    --arch) ARCH=${2:?--arch needs a list} && shift ;;
    --build) FOLDER=${2:?--build needs a folder} && shift ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0" && exit ;;
    *) die "unknown argument '$1'; see --help" 2 ;;
  esac
  shift
done
command -v nvcc >/dev/null || export PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || die "no nvcc on PATH nor in /usr/local/cuda/bin: the CUDA toolkit 13 is needed"
"$ROOT/scripts/setup.sh" --no-build

# Of the machine with the GPU; this one need not have any of them.
PYTHONS=(3.10 3.11 3.12 3.13 3.14)
PROGRAMS=(dmuond dmuonctl train_mlp e2e_trainer e2e_test cuda_host cuda_step_kernels_test
  cuda_newton_schulz_test)
MODULES=(dmuon_cuda dmuon_nccl dmuon_gpu_probe)
BUNDLE=$ROOT/gpu-bundle LOG=$ROOT/$FOLDER.log
WHEEL_REQUIREMENTS=$ROOT/python_client/requirements-wheel.txt
TOOLS=$CACHE/wheel-$(sha256sum "$WHEEL_REQUIREMENTS" | cut -c1-12)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# logged COMMAND...: what it says is shown when it fails.
logged() {
  "$@" >>"$LOG" 2>&1 || {
    tail -40 "$LOG" >&2
    die "$1 failed; all it said is in $LOG"
  }
}

make_tools() {
  exec 9>"$CACHE/setup.lock"
  flock 9
  [ -f "$TOOLS/.ready" ] || logged make_venv "$TOOLS" "$WHEEL_REQUIREMENTS" 9>&-
  exec 9>&-
}

# Configures the folder too. The programs look for their libraries beside themselves before anywhere else (RPATH, not
# RUNPATH, which says nothing about the libraries of libraries), and CUDA's come from LD_LIBRARY_PATH.
build_wheel() {
  local options=(DMUON_TESTS=ON DMUON_CUDA=ON CMAKE_BUILD_WITH_INSTALL_RPATH=ON "CMAKE_INSTALL_RPATH=\$ORIGIN/../lib"
    {CMAKE_EXE_LINKER_FLAGS,CMAKE_MODULE_LINKER_FLAGS}"=-Wl,--disable-new-dtags" ${ARCH:+"CMAKE_CUDA_ARCHITECTURES=$ARCH"})
  DMUON_STABLE_ABI=1 logged python -m pip wheel --disable-pip-version-check -v --no-deps --no-build-isolation -w "$WORK" \
    -C "build-dir=$ROOT/$FOLDER" "${options[@]/#/-Ccmake.define.}" "$ROOT/python_client"
}

# The libraries that Debian has and others may not have go into the wheel, under names of their own. The module's nanobind is
# another wheel for each version of Python, 100 KB each.
finish_wheels() {
  local version
  mkdir -p "$BUNDLE/wheels"
  PATH=$TOOLS/bin:$PATH logged auditwheel repair -w "$BUNDLE/wheels" "$WORK"/dmuon-*.whl
  for version in "${PYTHONS[@]}"; do
    logged "$TOOLS/bin/pip" download --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" \
      -d "$BUNDLE/wheels" -c "$WHEEL_REQUIREMENTS" nanobind-backend
  done
}

# Everything that programs and modules need but the C and C++ runtimes and CUDA, by the name that the loader asks for.
copy_libraries() {
  local name path
  find "$BUNDLE/bin" "$BUNDLE/lib" -type f -exec ldd {} + | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
    grep -vE '^(libc|libm|libdl|libpthread|librt|ld-linux.*|libgcc_s|libstdc\+\+|libcu.*|libnccl)\.so' |
    while read -r name path; do cp -L "$path" "$BUNDLE/lib/$name"; done
}

mkdir -p "$(dirname "$LOG")"
: >"$LOG"
make_tools
say "building $FOLDER (minutes, the first time; $LOG)"
build_wheel
logged ninja -C "$FOLDER" "${PROGRAMS[@]}" "${MODULES[@]}"

rm -rf "$BUNDLE"
mkdir -p "$BUNDLE"/{bin,lib,scripts,tests/cuda,tests/python}
for program in "${PROGRAMS[@]}"; do cp "$FOLDER/bin/$program" "$BUNDLE/bin/"; done
for module in "${MODULES[@]}"; do cp "$FOLDER/lib/lib$module.so" "$BUNDLE/lib/"; done
strip "$BUNDLE"/bin/* "$BUNDLE"/lib/*
copy_libraries
finish_wheels
cp scripts/gpu_check.sh "$BUNDLE/scripts/"
cp -r tests/cuda/gpu "$BUNDLE/tests/cuda/"
cp -r tests/python/support "$BUNDLE/tests/python/"
find "$BUNDLE" -name __pycache__ -exec rm -rf {} +
git rev-parse HEAD >"$BUNDLE/COMMIT"

bytes=$(du -sb "$BUNDLE" | cut -f1)
say "gpu-bundle: $(find "$BUNDLE" -type f | wc -l) files, $((bytes / 1024)) KiB, for CPython ${PYTHONS[0]} to ${PYTHONS[-1]}"
[ "$bytes" -le $((60 * 1024 * 1024)) ] || die "gpu-bundle is over 60 MiB"
