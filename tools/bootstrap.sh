#!/usr/bin/env bash
# Fetches what the build needs and a fresh Debian lacks, as an ordinary user: packages are unpacked under build/debian,
# never installed. Uses the pip and apt configuration of the machine.
#   bootstrap.sh venv DIR      makes a virtual environment with pip in it
#   bootstrap.sh headers PY    prints the folder of Python.h for the interpreter PY
#   bootstrap.sh googletest    prints the folder of GoogleTest's sources, or nothing if CMake finds an installed one
#   bootstrap.sh googletest-source   prints that folder in any case
#   bootstrap.sh libfabric     prints the folder of libfabric's headers, which are the same for every processor
set -euo pipefail
cd "$(dirname "$0")/.."
debian=$PWD/build/debian

die() {
  echo "bootstrap: $*" >&2
  exit 1
}

# Unpacks a Debian package under build/debian/tree. The second argument names the package to install instead.
unpack() {
  local package=$1 instead=$2 apt
  [[ ! -e $debian/$package.unpacked ]] || return 0 # others may read it at this moment
  command -v apt-get >/dev/null || die "there is no apt-get here: install $instead and try again."
  mkdir -p "$debian"/{lists,cache/archives}/partial "$debian/tree"
  apt=(apt-get -qq -o Dir::State::Lists="$debian/lists" -o Dir::Cache="$debian/cache" -o Acquire::Languages=none -o APT::Sandbox::User=root)
  if ! compgen -G "$debian/cache/$package"_*.deb >/dev/null; then
    (cd "$debian/cache" && { "${apt[@]}" download "$package" 2>/dev/null ||
      { "${apt[@]}" update >&2 && "${apt[@]}" download "$package" >&2; }; }) ||
      die "apt-get could not download $package: check the network, or install $instead and try again."
  fi
  dpkg -x "$debian/cache/$package"_*.deb "$debian/tree" || die "$package is damaged: remove build/debian and try again."
  touch "$debian/$package.unpacked"
}

venv() {
  local dir=$1 python=${PYTHON:-python3} wheel
  command -v "$python" >/dev/null || die "$python is missing: install Python 3.11 or newer."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$python is older than Python 3.11: name a newer one, as in 'make PYTHON=python3.12'."
  "$python" -c 'import ensurepip' 2>/dev/null && "$python" -m venv "$dir" && return
  unpack python3-pip-whl python3-venv
  wheel=$(compgen -G "$debian/tree/usr/share/python-wheels/pip-*.whl") || die "python3-pip-whl holds no pip: install python3-venv."
  "$python" -m venv --clear --without-pip "$dir"
  "$dir/bin/python" "$wheel/pip" install --quiet --no-index "$wheel"
}

headers() {
  local python=$1 version include root=
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if [[ ! -e $include/Python.h ]]; then
    unpack "libpython$version-dev" "python$version-dev"
    root=$debian/tree
    include=$root/usr/include/python$version
  elif grep -q 'linux-gnu/python' "$include/pyconfig.h"; then
    mkdir -p "$debian"
    cp -r "$include" "$debian"
    include=$debian/python$version
  fi
  # Debian's pyconfig.h only includes that of the machine's processor, by a path under /usr/include
  [[ $include != "$debian"/* ]] || cp "$root/usr/include/$(uname -m)-linux-gnu/python$version/pyconfig.h" "$include"
  echo "$include"
}

googletest() {
  [[ -e /usr/include/gtest/gtest.h ]] || googletest_source
}

googletest_source() {
  if [[ -e /usr/src/googletest/CMakeLists.txt ]]; then
    echo /usr/src/googletest
    return
  fi
  unpack googletest libgtest-dev
  echo "$debian/tree/usr/src/googletest"
}

# Prints a folder with nothing else in it: /usr/include has files that the cross compiler must not see.
libfabric() {
  local include=$debian/libfabric
  unpack libfabric-dev libfabric-dev
  mkdir -p "$include"
  cp -r "$debian/tree/usr/include/rdma" "$include"
  echo "$include"
}

case "${1:-} $#" in
  'venv 2') venv "$2" ;;
  'headers 2') headers "$2" ;;
  'googletest 1') googletest ;;
  'googletest-source 1') googletest_source ;;
  'libfabric 1') libfabric ;;
  *) die 'say venv DIR, headers PYTHON, googletest, googletest-source or libfabric.' ;;
esac
