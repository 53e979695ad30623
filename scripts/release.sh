#!/usr/bin/env bash
# Builds everything that a release consists of, and tags it. Nothing is published: that begins when the tag is pushed
# (.github/workflows/release.yml).
#
# usage: scripts/release.sh VERSION [--dry-run]
#
# What is built is in target/release-VERSION, with checksums. With --dry-run, everything is done but the tag.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: scripts/release.sh VERSION [--dry-run]"
version=${1:?$usage}
dry_run=false
case ${2:-} in
  "") ;;
  --dry-run) dry_run=true ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
fail() {
  echo "error: $*" >&2
  exit 1
}

# What takes no time, first.
scripts/release_checks.sh "$version"
branch=$(git branch --show-current)
[ "$branch" = main ] || fail "releases are made on main, and this is ${branch:-no branch}"
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed; git status lists them"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || fail "the tag v$version exists"
folder=target/release-$version
[ ! -e "$folder" ] || fail "$folder exists; remove it first"
commit=$(git rev-parse HEAD)

mkdir -p "$folder"
scripts/package_crates.sh "$folder"
for processor in "$(uname -m)" x86_64 aarch64; do
  # That of this machine comes first, for it can run.
  if ! compgen -G "$folder/fsdp-*-$processor-*.tar.gz" >/dev/null; then
    scripts/binary.sh "$folder" "$processor"
    scripts/wheel.sh "$folder" "$processor"
  fi
done
scripts/wheel.sh "$folder" cuda
scripts/sbom.sh "$folder"
scripts/release_folder.sh "$folder"
if [ "$(git rev-parse HEAD)" != "$commit" ] || [ -n "$(git status --porcelain)" ]; then
  fail "the repository changed while the release was built; $folder is not what a tag would be of"
fi

if $dry_run; then
  echo "v$version could be tagged; what was built is in $folder"
else
  git tag --annotate "v$version" --message "fsdp $version" "$commit"
  echo "v$version is tagged; to publish it: git push origin v$version"
fi
