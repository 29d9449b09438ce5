#!/usr/bin/env bash
# Prepares a Debian machine.
#   scripts/setup.sh packages GROUP...   installs what is missing of packages.txt
#   scripts/setup.sh venv [check|docs|test]  makes .venv from requirements.txt and those named
#   scripts/setup.sh sysroot             unpacks the libraries for aarch64 below build/aarch64
# They do nothing, quickly, when everything is there. Without root and without sudo, `packages`
# names what is missing and the line that installs it, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }

# at_least VERSION PROGRAM: the program is on the PATH and is that new.
at_least() {
  local have
  have=$("$2" --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  [ -n "$have" ] && [ "$(printf '%s\n' "$1" "$have" | sort -V | head -1)" = "$1" ]
}

# The Python in use can be built against.
python_headers() {
  local folder
  folder=$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -e "$folder/Python.h" ]
}

# Prints the packages of the given groups that are not installed and not served otherwise.
missing_packages() {
  local groups=" $* " group package probe installed
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p')
  while read -r group package probe; do
    [[ $groups == *" $group "* ]] || continue
    grep -qxF -- "$package" <<<"$installed" && continue
    [ -n "$probe" ] && eval "$probe" >/dev/null 2>&1 && continue
    printf '%s\n' "$package"
  done < <(grep -Ev '^(#|$)' scripts/packages.txt)
}

packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "no Debian here: see scripts/packages.txt for what is needed; going on"
    return
  fi
  local missing as_root=()
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0

  if [ "$(id -u)" -ne 0 ]; then
    # A sudo that would ask for a password helps only where somebody can answer.
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      as_root=(sudo)
    else
      say "these Debian packages are missing: ${missing[*]}"
      say "install them with: apt-get update && apt-get install -y ${missing[*]}   (as root)"
      exit 1
    fi
  fi
  say "installing ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq
             -o DPkg::Lock::Timeout=300)
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null
}

# Installs a list of packages into .venv, once: pip_install LIST [OPTION...]
pip_install() {
  local list=scripts/$1 done=.venv/$1
  shift
  cmp -s "$list" "$done" && return
  say "installing $list into .venv"
  # Python compiles what it imports; pip would compile all of it, for most of a minute.
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile "$@" -r "$list"
  cp "$list" "$done"
}

venv() {
  if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    say "making .venv"
    "${PYTHON:-python3}" -m venv --clear .venv
  fi
  pip_install requirements.txt
  [ -n "${1-}" ] || return 0
  if [ "$1" = check ]; then
    pip_install requirements-check.txt
    return
  fi
  pip_install requirements-test.txt
  pip_install requirements-docs.txt
  [ "$1" = test ] || return 0
  pip_install requirements-check.txt  # a test runs mypy
  # With the operators that tests use: compiled once, here, not by the first tests to ask for them.
  # A wheel that pip has kept may lack them.
  DS_BUILD_CPU_ADAM=1 DS_BUILD_SHM_COMM=1 CXX=$PWD/scripts/compile_quickly.sh \
    pip_install requirements-deepspeed.txt --no-build-isolation --no-cache-dir
}

# The packages of another architecture, without a change to this machine: apt-get fetches them with
# lists of its own.
sysroot() {
  local folder=$PWD/build/aarch64/sysroot names apt
  names=$(sed -n 's/^arm64 *//p' scripts/packages.txt)
  [ "$(cat "$folder/names" 2>/dev/null)" != "$names" ] || return 0
  say "fetching" $names "for aarch64"
  rm -rf "$folder"
  mkdir -p "$folder"/apt/{lists,cache,packages}
  touch "$folder/apt/status"
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64
       -o APT::Sandbox::User= -o Acquire::Languages=none -o Dir::State="$folder/apt"
       -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt/cache")
  "${apt[@]}" update
  (cd "$folder/apt/packages" && "${apt[@]}" download $names)
  local package
  for package in "$folder"/apt/packages/*.deb; do dpkg-deb -x "$package" "$folder"; done
  rm -rf "$folder/apt"
  printf '%s\n' "$names" >"$folder/names"
}

case ${1-} in
  packages) shift; packages "$@" ;;
  venv) venv "${2-}" ;;
  sysroot) sysroot ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
