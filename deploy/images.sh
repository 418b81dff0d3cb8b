#!/bin/sh
# Build both images without a Docker engine, on a Debian base from scratch: `make images`. Needs root, buildah, debootstrap.
# IMAGE_OPTIONS: more options for `buildah bud`, e.g. --build-arg TORCH_INDEX=URL. TARGETS: "service worker".
set -eu
cd "$(dirname "$0")/.."
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
revision=$(git rev-parse HEAD 2> /dev/null || echo unknown)
for command in buildah debootstrap; do
    command -v "$command" > /dev/null || { echo "make images needs $command (Debian: apt install $command)" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! buildah inspect --type image trainshed-base:bookworm > /dev/null 2>&1; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/root" > "$work/log" \
        || { tail -n 20 "$work/log" >&2; exit 1; }
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$work/root" / > /dev/null
    buildah commit --quiet --rm "$base" trainshed-base:bookworm > /dev/null
fi
for target in ${TARGETS:-service worker}; do
    name=trainshed; [ "$target" = service ] || name=trainshed-$target
    # shellcheck disable=SC2086
    buildah bud --isolation chroot --layers --file deploy/Dockerfile --target "$target" --tag "$name:$tag" \
        --build-arg BASE=localhost/trainshed-base:bookworm ${IMAGE_OPTIONS:-} .
    # Here, because the cache of buildah takes a LABEL for the same if only its arguments differ.
    image=$(buildah from "$name:$tag")
    buildah config --label "org.opencontainers.image.version=$tag" --label "org.opencontainers.image.revision=$revision" "$image"
    buildah commit --quiet --rm "$image" "$name:$tag" > /dev/null
    echo "built $name:$tag"
done
