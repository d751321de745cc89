#!/usr/bin/env bash
# Builds what scripts/gpu_check.sh runs on a machine with a GPU, into gpu-bundle/: the CUDA backend as it ships, its tests, and
# the shared libraries that such a machine may lack. CUDA's own libraries stay out: the machine brings them.
#
# usage: scripts/gpu_bundle.sh [--arch LIST] [--build FOLDER]
#   --arch LIST     CUDA architectures, as CMake writes them (default: those that ship)
#   --build FOLDER  build folder (default: build/gpu-bundle)
set -euo pipefail
cd "$(dirname "$0")/.."

arch=""
build=build/gpu-bundle
while (($#)); do
  case $1 in
    --arch) arch=$2; shift 2 ;;
    --build) build=$2; shift 2 ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done

tests=(cuda_step_kernels_test cuda_newton_schulz_test)
cmake -G Ninja -B "$build" -S . -DCMAKE_BUILD_TYPE=Release -DDMUON_CUDA=ON -DDMUON_SERVER=OFF -DDMUON_PYTHON=OFF \
  ${arch:+-DCMAKE_CUDA_ARCHITECTURES="$arch"} > "$build.cmake.log" 2>&1 || { tail -20 "$build.cmake.log"; exit 1; }
ninja -C "$build" dmuon_cuda dmuon_gpu_probe "${tests[@]}"

rm -rf gpu-bundle
mkdir -p gpu-bundle/bin gpu-bundle/lib
cp "$build"/lib/libdmuon_cuda.so "$build"/lib/libdmuon_gpu_probe.so gpu-bundle/lib/
for test in "${tests[@]}"; do cp "$build/bin/$test" gpu-bundle/bin/; done
strip gpu-bundle/bin/* gpu-bundle/lib/*

# Everything they need but the C and C++ runtimes and CUDA, by the name that the loader asks for.
needed=$(ldd gpu-bundle/bin/* gpu-bundle/lib/libdmuon_*.so | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  grep -vE '^(libc|libm|libdl|libpthread|librt|ld-linux.*|libgcc_s|libstdc\+\+|libcu.*)\.so' || true)
while read -r name path; do
  [[ -n $name ]] && cp -L "$path" "gpu-bundle/lib/$name"
done <<< "$needed"

git rev-parse HEAD > gpu-bundle/COMMIT
bytes=$(du -sb gpu-bundle | cut -f1)
echo "gpu-bundle: $(find gpu-bundle -type f | wc -l) files, $((bytes / 1024)) KiB"
((bytes <= 60 * 1024 * 1024)) || { echo "error: gpu-bundle is over 60 MiB" >&2; exit 1; }
