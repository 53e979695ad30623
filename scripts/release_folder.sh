#!/usr/bin/env bash
# Completes the folder of a release: adds install.sh, with the address that the folder will have, and SHA256SUMS of all files.
#
# usage: scripts/release_folder.sh FOLDER [ADDRESS]
#
# Without an address, install.sh asks for FSDP_BASE_URL.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/release_folder.sh FOLDER [ADDRESS]}
address=${2:-}
if [[ ! $address =~ ^[A-Za-z0-9:/._~-]*$ ]]; then
  echo "error: $address is not an address" >&2
  exit 2
fi

sed "s|^default_base_url=\$|default_base_url=$address|" install.sh >"$folder/install.sh"
grep -qx "default_base_url=$address" "$folder/install.sh"
cd "$folder"
rm -f SHA256SUMS
sums=$(find . -type f -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum)
echo "$sums" >SHA256SUMS
