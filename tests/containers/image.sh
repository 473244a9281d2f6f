#!/bin/sh
# image.sh NAME:TAG: builds the Dockerfile with buildah, as root.
# Where no registry has the base, debootstrap makes it of Debian's packages, under the base's name. Where no index has
# torch's CPU build, the image takes PyPI's: 3 GB to fetch, 20 GB of disk while it is built.
set -eu
cd "$(dirname "$0")/../.."
base=$(sed -n 's/^ARG BASE=//p' Dockerfile)
index=$(sed -n 's/^ARG TORCH_CPU_INDEX_URL=//p' Dockerfile)

if ! buildah inspect --type image "$base" >/dev/null 2>&1 && ! buildah pull --quiet "$base"; then
    echo "no registry has $base: debootstrap makes it ..."
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    mirror=$(sed -nE 's/^(URIs: |deb )(https?:[^ ]+).*/\2/p' /etc/apt/sources.list.d/*.sources /etc/apt/sources.list \
        2>/dev/null | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python-is-python3 bookworm \
        "$root/base" "${mirror:-http://deb.debian.org/debian}" >/dev/null
    rm -rf "$root"/base/var/cache/apt/archives/*.deb "$root"/base/var/lib/apt/lists/*
    # This machine's authorities too, for the indexes that it reaches.
    cp /etc/ssl/certs/ca-certificates.crt "$root/base/etc/ssl/certs/"
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$root/base" / >/dev/null
    buildah config --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$container"
    buildah commit --quiet --rm "$container" "docker.io/library/$base" >/dev/null
fi

torch=cpu
if ! python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=20)' "$index" 2>/dev/null; then
    echo "torch's CPU index is not reached: the image takes PyPI's build"
    torch=cuda
fi
# chroot: without rights to raise limits, too.
buildah bud --isolation chroot --network host --build-arg TORCH=$torch --tag "$1" .
