#!/usr/bin/env bash
# Builds the images of containers/ from the files of a release: fsdp, for both processors, and fsdp-cuda. Needs docker with buildx.
#
# usage: scripts/images.sh FOLDER --try                only fsdp, for this machine, which says its version
#        scripts/images.sh FOLDER --push REGISTRY      both, with the version and `latest` as tags
#
# It is an error if fsdp, as it is tried, has more than 40 MB.
# Pushing to ghcr.io takes REGISTRY_TOKEN; elsewhere, `docker login` comes first.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/images.sh FOLDER --try | --push REGISTRY}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
# unpack PROCESSOR ITS_NAME_FOR_IMAGES
unpack() {
  local archive="fsdp-$version-$1-unknown-linux-musl"
  mkdir "$context/$2"
  tar -xzf "$folder/$archive.tar.gz" -C "$context/$2" --strip-components=1 \
    "$archive"/{fsdp,LICENSE-APACHE,LICENSE-MIT,LICENSES-OF-OTHERS}
}

case ${2:-} in
  --try)
    case $(uname -m) in
      x86_64) unpack x86_64 amd64 ;;
      aarch64) unpack aarch64 arm64 ;;
    esac
    docker build --file containers/Dockerfile --tag fsdp:latest "$context"
    docker run --rm fsdp:latest --version
    bytes=$(docker image inspect --format '{{.Size}}' fsdp:latest)
    if [ "$bytes" -gt 40000000 ]; then
      echo "error: the image fsdp has $bytes bytes; it may have 40000000" >&2
      exit 1
    fi
    ;;
  --push)
    registry=$(tr '[:upper:]' '[:lower:]' <<<"${3:?the registry}")
    if [ -n "${REGISTRY_TOKEN:-}" ]; then
      docker login "${registry%%/*}" --username token --password-stdin <<<"$REGISTRY_TOKEN"
    fi
    docker buildx create --name fsdp --use
    # push FILE NAME PLATFORMS
    push() {
      docker buildx build --push --provenance=mode=max --sbom=true --platform "$3" --file "containers/$1" \
        --tag "$registry/$2:$version" --tag "$registry/$2:latest" "$context"
    }
    unpack x86_64 amd64
    unpack aarch64 arm64
    push Dockerfile fsdp linux/amd64,linux/arm64
    cp "$folder"/fsdp-*x86_64.whl "$folder"/fsdp_cuda-*x86_64.whl "$context"
    push cuda.Dockerfile fsdp-cuda linux/amd64
    ;;
  *)
    echo "usage: scripts/images.sh FOLDER --try | --push REGISTRY" >&2
    exit 2
    ;;
esac
