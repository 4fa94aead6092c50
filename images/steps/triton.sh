#!/bin/sh
# usage: triton.sh PREFIX
# Triton compiles kernels itself, but calls a C compiler (CC) to compile its library driver.c for every new cache. The
# image has no compiler. This script compiles the library, and PREFIX/bin/triton-cc returns it in place of a compiler.
set -eu
prefix=$1 python=$1/bin/python work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
backend=$("$python" -c 'import importlib.util as u, os; print(os.path.dirname(u.find_spec("triton").origin))')/backends/nvidia
# Triton up to 3.6 also compiles a launcher in C for each signature of a kernel, which no library can replace.
if grep -q 'compile_module_from_src(' "$backend/driver.py"; then
  echo "triton.sh: this Triton compiles C at run time, for which the image has no compiler. Install a newer one." >&2
  exit 1
fi
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths(scheme="posix_prefix")["include"])')
if [ ! -e "$include/Python.h" ]; then apt-get install -qq -y --no-install-recommends libpython3-dev >/dev/null; fi
mkdir -p "$prefix/lib/triton"
# The node provides the driver. The linker needs only its name.
gcc -shared -nostdlib -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so.1"
gcc "$backend/driver.c" -O3 -shared -fPIC -Wno-psabi -s -Wl,--build-id=none -I"$backend/include" -I"$include" \
  -L"$work" -l:libcuda.so.1 -o "$prefix/lib/triton/driver.so"
cp "$backend/driver.c" "$prefix/lib/triton/driver.c"
cat >"$prefix/bin/triton-cc" <<'END'
#!/bin/sh
# Replaces Triton's C compiler: returns the precompiled library (see images/steps/triton.sh).
set -eu
made=$(dirname "$(dirname "$(readlink -f "$0")")")/lib/triton
source='' target=''
while [ $# -gt 0 ]; do
  case $1 in
    -o) target=$2 && shift ;;
    *.c) source=$1 ;;
  esac
  shift
done
if [ -n "$source" ] && [ -n "$target" ] && cmp -s "$source" "$made/driver.c"; then exec cp "$made/driver.so" "$target"; fi
echo "$source: this image has no compiler. Only Triton's own driver.c is precompiled." >&2
exit 1
END
chmod +x "$prefix/bin/triton-cc"
