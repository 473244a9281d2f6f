#!/bin/sh
# Writes the current digest of each image that is not ours: NAME:TAG becomes NAME:TAG@sha256:... in the Dockerfile
# and the manifests, and an existing digest is replaced. Needs skopeo and access to the registries.
set -eu
cd "$(dirname "$0")/.."
files=$(grep -rlE '(image: |ARG BASE=)[^ ]+:' Dockerfile k8s --include=Dockerfile --include='*.yaml')
images=$(grep -ohE '(image: |ARG BASE=)[^ @]+:[^ @]+' $files | sed -E 's/image: |ARG BASE=//' | grep -v '^specwire:' | sort -u)
for image in $images; do
    digest=$(skopeo inspect --no-tags --format '{{.Digest}}' "docker://$image")
    sed -E -i "s#((image: |ARG BASE=)$image)(@sha256:[0-9a-f]{64})?\$#\1@$digest#" $files
    echo "$image@$digest"
done
