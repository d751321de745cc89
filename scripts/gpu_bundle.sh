#!/usr/bin/env bash
# Builds what scripts/gpu_check.sh runs on a machine with a GPU, into gpu-bundle/: daemon, tool, C++ trainers, the CUDA
# backend as it ships, their tests, the Python package, and the shared libraries that such a machine may lack. CUDA's own
# libraries stay out: the machine brings them.
#
# usage: scripts/gpu_bundle.sh [--arch LIST] [--build FOLDER] [--python PROGRAM]
#   --arch LIST       CUDA architectures, as CMake writes them (default: those that ship)
#   --build FOLDER    build folder (default: build/gpu-bundle)
#   --python PROGRAM  the Python whose version the GPU machine has, with headers and nanobind (default: python3.12);
#                     without one the bundle has no Python package, and the check leaves its trainer out
set -euo pipefail
cd "$(dirname "$0")/.."

arch=""
build=build/gpu-bundle
python=python3.12
while (($#)); do
  case $1 in
    --arch) arch=$2; shift 2 ;;
    --build) build=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done

programs=(dmuond dmuonctl train_mlp e2e_trainer e2e_test cuda_step_kernels_test cuda_newton_schulz_test)
modules=(libdmuon_cuda.so libdmuon_nccl.so libdmuon_gpu_probe.so)
targets=("${programs[@]}" dmuon_cuda dmuon_nccl dmuon_gpu_probe)

options=(-DDMUON_PYTHON=OFF)
if "$python" -c 'import nanobind, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null; then
  options=(-DDMUON_PYTHON=ON "-DPython_EXECUTABLE=$(command -v "$python")")
  targets+=(dmuon_python)
else
  echo "no Python package in this bundle: it needs $python with its headers (on Debian: $(basename "$python")-dev) and \
nanobind (pip install nanobind); or name another by --python"
fi

cmake -G Ninja -B "$build" -S . -DCMAKE_BUILD_TYPE=Release -DDMUON_CUDA=ON "${options[@]}" \
  ${arch:+-DCMAKE_CUDA_ARCHITECTURES="$arch"} \
  > "$build.cmake.log" 2>&1 || { tail -20 "$build.cmake.log"; exit 1; }
ninja -C "$build" "${targets[@]}"

rm -rf gpu-bundle
mkdir -p gpu-bundle/bin gpu-bundle/lib
for module in "${modules[@]}"; do cp "$build/lib/$module" gpu-bundle/lib/; done
for program in "${programs[@]}"; do cp "$build/bin/$program" gpu-bundle/bin/; done
[[ ${options[0]} == *=OFF ]] || cp -rL "$build/python" gpu-bundle/
find gpu-bundle -type f \( -path '*/bin/*' -o -name '*.so' \) -exec strip {} +

# Everything they need but the C and C++ runtimes and CUDA, by the name that the loader asks for.
needed=$(find gpu-bundle -type f \( -path '*/bin/*' -o -name '*.so' \) -exec ldd {} + |
  awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  grep -vE '^(libc|libm|libdl|libpthread|librt|ld-linux.*|libgcc_s|libstdc\+\+|libcu.*|libnccl)\.so' || true)
while read -r name path; do
  [[ -n $name ]] && cp -L "$path" "gpu-bundle/lib/$name"
done <<< "$needed"

git rev-parse HEAD > gpu-bundle/COMMIT
bytes=$(du -sb gpu-bundle | cut -f1)
echo "gpu-bundle: $(find gpu-bundle -type f | wc -l) files, $((bytes / 1024)) KiB"
((bytes <= 60 * 1024 * 1024)) || { echo "error: gpu-bundle is over 60 MiB" >&2; exit 1; }
