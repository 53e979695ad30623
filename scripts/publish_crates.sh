#!/usr/bin/env bash
# Publishes all crates on crates.io, each after those that it needs. scripts/package_crates.sh has built them from each other,
# so they are not built again. CARGO_REGISTRY_TOKEN says who you are.
#
# usage: scripts/publish_crates.sh [--dry-run]
#
# A version that is there already is passed over, so running this again goes on where it stopped. crates.io takes five new crates at
# once and then one in ten minutes; where it says so (status 429), this waits and tries again. The first release takes 100 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
# Seconds until crates.io takes another new crate, and how often that is waited for with one crate.
wait=610 tries=4

if [ "${1:-}" = --dry-run ]; then
  # None is in the registry for the next one, which Cargo allows only for all at once.
  exec cargo publish --workspace --exclude fsdp-tests --exclude fsdp-published --exclude fsdp-gpu-bench --locked --no-verify --dry-run
fi

# With dependencies of tests, which a registry must have too.
order=$(cargo metadata --locked --no-deps --format-version 1 | python3 -c '
import graphlib, json, sys

packages = {package["name"]: package for package in json.load(sys.stdin)["packages"] if package["publish"] is None}
needs = {name: sorted({used["name"] for used in package["dependencies"]} & packages.keys()) for name, package in packages.items()}
print(*graphlib.TopologicalSorter(needs).static_order(), sep="\n")
')
said=$(mktemp)
trap 'rm -f "$said"' EXIT

publish() {
  for ((try = 1; ; try++)); do
    if cargo publish --package "$1" --locked --no-verify 2>&1 | tee "$said"; then
      return
    fi
    if grep -Eq 'already (exists on|uploaded)' "$said"; then
      echo "$1 has this version already"
      return
    fi
    if ! grep -Eq 'status 429|Too Many Requests' "$said" || [ "$try" = "$tries" ]; then
      echo "error: $1 is not published, nor what comes after it; run this again to go on" >&2
      exit 1
    fi
    echo "waiting $wait s for crates.io, which takes no more new crates for now"
    sleep "$wait"
  done
}

for crate in $order; do
  publish "$crate"
done
