# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it, in bash, with the project's root as the working folder.

say() { printf '\n== %s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# Installs the Debian or Ubuntu packages among the arguments that are missing; "a|b" means either.
install_packages() {
  local wanted=() package choice found sudo=()
  command -v dpkg-query >/dev/null || die "this script installs packages with apt; on another system install what README.md lists and use cmake directly"
  for package in "$@"; do
    found=0
    for choice in ${package//|/ }; do
      if [ "$(dpkg-query -W -f='${db:Status-Status}' "$choice" 2>/dev/null)" = installed ]; then found=1; fi
    done
    [ $found = 1 ] || wanted+=("${package%%|*}")
  done
  [ ${#wanted[@]} -gt 0 ] || return 0
  say "installing ${wanted[*]}"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "needs root, or sudo, to install: ${wanted[*]}"
    sudo=(sudo)
  fi
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq ||
    echo "apt-get update failed; trying with the lists that are here" >&2
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" </dev/null >/dev/null ||
    die "could not install: ${wanted[*]}"
}

build_packages=(g++ cmake ninja-build libfmt-dev libspdlog-dev doctest-dev nlohmann-json3-dev libsodium-dev libcli11-dev python3-venv)

# A virtual environment in .venv. Fails, quietly enough, where Python has no venv.
make_venv() {
  [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null && return 0
  rm -rf .venv
  python3 -m venv .venv
}

# pip_install PACKAGE…: into .venv; returns pip's verdict.
pip_install() {
  make_venv && .venv/bin/pip install -q --disable-pip-version-check --no-input "$@" </dev/null
}

# The CUDA major of the installed driver, or nothing.
driver_major() {
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1
}

have_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# True where a CUDA toolkit has both headers.
have_toolkit() {
  local root
  for root in ${CUDA_HOME:-} ${CUDA_PATH:-} /usr/local/cuda /usr/local/cuda-*; do
    if [ -f "$root/include/cuda.h" ] && [ -f "$root/include/nvrtc.h" ] &&
       ls "$root"/lib64/libnvrtc.so.1[23]* >/dev/null 2>&1; then return 0; fi
  done
  return 1
}

# Headers and NVRTC: the toolkit's where there is one, else PyPI's in .venv, of the driver's CUDA major. With the
# environment active, the build and the library find them there.
provide_cuda() {
  local major
  major=$(driver_major)
  if have_toolkit; then
    # A driver for CUDA 12 cannot load what NVRTC 13 writes.
    if [ "${major:-13}" = 12 ] && ! ls /usr/local/cuda*/lib64/libnvrtc.so.12 >/dev/null 2>&1; then
      pip_install 'nvidia-cuda-nvrtc-cu12' || echo "no NVRTC 12 for this driver could be installed" >&2
    fi
    return 0
  fi
  say "no CUDA toolkit here: taking NVRTC and the headers from PyPI"
  if [ "${major:-13}" = 12 ]; then
    pip_install 'nvidia-cuda-runtime-cu12' 'nvidia-cuda-nvrtc-cu12'
  else
    pip_install 'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'
  fi || die "could not install NVRTC from PyPI; install a CUDA toolkit (12.3 or newer) instead"
}

activate_venv() {
  [ -x .venv/bin/python ] || return 0
  VIRTUAL_ENV=$PWD/.venv
  PATH=$VIRTUAL_ENV/bin:$PATH
  export VIRTUAL_ENV PATH
}

# build PRESET [cmake arguments… [-- build arguments…]]
build() {
  local preset=$1 configure=()
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do configure+=("$1"); shift; done
  [ $# -eq 0 ] || shift
  say "building build/$preset"
  # A checkout that moved has a cache that cmake refuses.
  if [ -f "build/$preset/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "build/$preset/CMakeCache.txt"; then
    rm -rf "build/$preset"
  fi
  cmake --preset "$preset" "${configure[@]}" >"$build_log_dir/configure-$preset.log" 2>&1 ||
    { cat "$build_log_dir/configure-$preset.log" >&2; die "cmake --preset $preset failed"; }
  cmake --build --preset "$preset" -j "${QKVJIT_JOBS:-$(nproc)}" "$@" || die "building build/$preset failed"
}
build_log_dir=build
mkdir -p build
