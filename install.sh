#!/bin/sh
# Installs the command `fsdp`: one static binary for Linux, on x86-64 and 64-bit ARM.
#
#   curl -sSf ADDRESS/install.sh | sh
#
# Its SHA-256 is checked before anything is put in place, and an existing `fsdp` is replaced by one rename: whatever goes
# wrong, the folder is as it was. Variables:
#
#   FSDP_INSTALL_DIR   where the command goes (~/.local/bin)
#   FSDP_BASE_URL      the folder of a release, with SHA256SUMS
#
# Needs curl or wget, tar, and sha256sum or shasum.
set -eu

# The folder that the releases are served from. The project has no address yet, so this copy has none either;
# scripts/release_folder.sh writes the address into the copy that goes with a release.
default_base_url=

say() { printf '%s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
has() { command -v "$1" >/dev/null 2>&1; }

# Prints what the files of a release call this machine.
target() {
  system=$(uname -s)
  machine=$(uname -m)
  other="elsewhere, \`cargo install fsdp-cli\` builds it"
  [ "$system" = Linux ] || fail "there is no binary for $system, only for Linux; $other"
  case $machine in
    x86_64 | amd64) say x86_64-unknown-linux-musl ;;
    aarch64 | arm64) say aarch64-unknown-linux-musl ;;
    *) fail "there is no binary for Linux on $machine, only on x86_64 and aarch64; $other" ;;
  esac
}

# download URL FILE
download() {
  if has curl; then
    curl --fail --silent --show-error --location --retry 3 --output "$2" "$1" || fail "$1 could not be downloaded"
  elif has wget; then
    wget -q -O "$2" "$1" || fail "$1 could not be downloaded"
  else
    fail "curl or wget is needed to download, and neither is here"
  fi
}

# Prints the SHA-256 of a file.
sha256() {
  if has sha256sum; then
    sum=$(sha256sum "$1")
  elif has shasum; then
    sum=$(shasum -a 256 "$1")
  else
    fail "sha256sum or shasum is needed to check the download, and neither is here"
  fi
  say "${sum%% *}"
}

# Prints the line of SHA256SUMS for this machine: checksum, two spaces, name.
line_of() {
  lines=$(grep -E "^[0-9a-f]{64}  fsdp-[0-9A-Za-z.+-]+-$2\.tar\.gz\$" "$1") || fail "the release at $base_url has no file for $2"
  [ "$(say "$lines" | wc -l)" -eq 1 ] || fail "the release at $base_url has several files for $2"
  say "$lines"
}

# The parts of this run that must not outlive it.
clean() {
  [ -z "${work:-}" ] || rm -rf "$work"
  [ -z "${staged:-}" ] || rm -f "$staged"
}

main() {
  base_url=${FSDP_BASE_URL:-$default_base_url}
  [ -n "$base_url" ] || fail "this copy of install.sh does not know where releases are: set FSDP_BASE_URL, or take the install.sh of a release"
  base_url=${base_url%/}
  folder=${FSDP_INSTALL_DIR:-${HOME:?is not set; set it, or FSDP_INSTALL_DIR}/.local/bin}
  target=$(target)

  trap clean EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  work=$(mktemp -d)
  download "$base_url/SHA256SUMS" "$work/SHA256SUMS"
  line=$(line_of "$work/SHA256SUMS" "$target")
  name=${line#*  }
  download "$base_url/$name" "$work/$name"
  got=$(sha256 "$work/$name")
  [ "$got" = "${line%%  *}" ] || fail "$base_url/$name has the SHA-256 $got instead of ${line%%  *}; nothing was installed"
  tar -xzf "$work/$name" -C "$work" || fail "$name could not be unpacked"

  mkdir -p "$folder" || fail "$folder could not be made; set FSDP_INSTALL_DIR to a folder that you may write to"
  [ ! -d "$folder/fsdp" ] || fail "$folder/fsdp is a folder; remove it, or set FSDP_INSTALL_DIR to another place"
  staged=$(mktemp "$folder/.fsdp.XXXXXX") || fail "$folder is not writable; set FSDP_INSTALL_DIR to a folder that you may write to"
  cp "$work/${name%.tar.gz}/fsdp" "$staged" || fail "$folder could not be written to"
  chmod 755 "$staged"
  version=$("$staged" --version) || fail "the binary does not run on this machine; nothing was installed"
  mv -f "$staged" "$folder/fsdp" || fail "$folder/fsdp could not be replaced"

  say "installed $version in $folder"
  found=$(command -v fsdp || true)
  if [ -z "$found" ]; then
    say "$folder is not on your PATH; add it there, for example in ~/.profile:"
    say "  export PATH=\"$folder:\$PATH\""
  elif [ "$(cd "${found%/*}" && pwd -P)" != "$(cd "$folder" && pwd -P)" ]; then
    say "note: \`fsdp\` is $found on your PATH, which comes before $folder"
  fi
}

# The last line: of a script that did not arrive whole, nothing is run.
main "$@"
