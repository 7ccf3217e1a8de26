#!/usr/bin/env bash
# Build the images, run a gateway and a site of them, ask a query and show user, size and health. In one line:
#
#   ENGINE=docker infra/images/try.sh docker.io/library/python:3.11-slim-bookworm
#
# ENGINE is docker or podman; the argument is the base image. Where the base is one of your own, without a registry:
#
#   mmdebstrap --variant=minbase --include=python3-dev,python3-venv,python-is-python3,ca-certificates bookworm base.tar
#   ENGINE=podman infra/images/try.sh "$(podman import base.tar localhost/python:3.11)"
#
# BUILD holds further arguments of the build, such as --build-arg PIP_INDEX_URL=….  IMAGES names the images to build, by
# default all but the one for GPUs, which is 5 GB: IMAGES="gateway allinone engine".
set -euo pipefail
cd "$(dirname "$0")/../.."
engine=${ENGINE:-docker} base=${1:?name the base image, such as docker.io/library/python:3.11-slim-bookworm}
token=$(openssl rand -hex 24)
run=("$engine" run --detach --network host --read-only --tmpfs /tmp --cap-drop ALL)
started=()
trap '[ ${#started[@]} -eq 0 ] || "$engine" rm --force "${started[@]}" > /dev/null' EXIT

for image in ${IMAGES:-gateway allinone}; do
  # shellcheck disable=SC2086
  "$engine" build ${BUILD:-} --build-arg "PYTHON=$base" --file "infra/images/$image.Dockerfile" --tag "mico-$image" .
  user=$("$engine" run --rm --entrypoint id "mico-$image" -u)
  size=$("$engine" image inspect --format '{{.Size}}' "mico-$image")
  echo "mico-$image: user $user, $((size / 1000000)) MB"
  [ "$user" = 10001 ]
done

gateway=$("${run[@]}" --tmpfs /var/lib/mico:uid=10001,mode=0700 --entrypoint /bin/sh \
  --env MICO_DATABASE_URL=sqlite:////var/lib/mico/mico.db --env MICO_GATEWAY_DATABASE_URL=sqlite:////var/lib/mico/mico.db \
  --env MICO_FOLDER=/var/lib/mico --env MICO_GATEWAY_FOLDER=/var/lib/mico --env "MICO_GATEWAY_SITE_TOKENS=$token" \
  mico-gateway -c 'mico db upgrade && exec mico gateway')
started+=("$gateway")
site=$("${run[@]}" --tmpfs /var/lib/mico:uid=10001,mode=0700 \
  --env MICO_SITE_SITE=try --env MICO_SITE_GATEWAYS=127.0.0.1:8081 --env "MICO_SITE_TOKEN=$token" \
  --env MICO_SITE_MODEL=/opt/mico/demo-model --env MICO_SITE_SERVED_MODEL=mico-demo --env MICO_SITE_SLOTS=4 \
  --env MICO_SITE_KV_TOKENS=2048 mico-allinone site)
started+=("$site")

for _ in $(seq 120); do
  curl --silent --fail --output /dev/null http://127.0.0.1:8080/ready && break
  sleep 1
done
key=$("$engine" exec "$gateway" mico keys create try --json | sed -n 's/.*"key": "\(.*\)".*/\1/p')
"$engine" exec --env "MICO_API_KEY=$key" "$gateway" mico chat -m mico-demo -q "Name three rivers." --stats
"$engine" exec "$site" python /opt/mico/linked.py && echo "site: linked"
"$engine" exec "$gateway" python -c "import urllib.request as http; print('gateway:', http.urlopen('http://127.0.0.1:8080/health').status)"
