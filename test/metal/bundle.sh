#!/usr/bin/env bash
# Makes a bundle for a host with a GPU and its driver, but without Go, network
# or registry: everything that test/metal/run.sh needs, in parts of at most
# 46 MiB that any way of copying takes. Run by `make metal-bundle`.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=$PWD/_output/metal
bundle=$out/bundle
rm -rf "$out"
mkdir -p "$bundle/bin"

echo "bundle: Kubernetes and what it stands on"
go run ./sim/cmd/localcluster build --output "$bundle/bin"
echo "bundle: image, chart, programs"
go run ./deployments/container/build -output "$bundle/tessera.tar"
cp -r deployments/helm/tessera "$bundle/chart"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$bundle/" ./sim/cmd/localcluster
CGO_ENABLED=1 go build -trimpath -ldflags '-s -w' -o "$bundle/" ./test/bench
CGO_ENABLED=1 go test -c -trimpath -ldflags '-s -w' -o "$bundle/contract.test" ./pkg/nvml
cp test/metal/*.cu test/metal/*.yaml test/metal/*.py test/metal/{lib,mps,churn,pytorch,health,usage}.sh "$bundle/"
cp test/metal/run.sh "$out/"

echo "bundle: packing $(du -sh "$bundle" | cut -f1)"
# The binaries are links to cached ones; tar's exit status 1 says only that a
# link was made or removed meanwhile.
(tar -C "$out" -cf - bundle || [ $? = 1 ]) | xz -T0 -3 | split --bytes 46MiB - "$out/metal.tar.xz."
rm -rf "$bundle"
(cd "$out" && sha256sum metal.tar.xz.* > SHA256SUMS && ls -l)
echo "bundle: copy $out to the host and run: ./run.sh (as root, in that directory)"
