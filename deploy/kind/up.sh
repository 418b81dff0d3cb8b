#!/bin/sh
# A Kubernetes cluster on this machine with KubeRay, Trainshed and one job. Needs docker, kind, kubectl, helm, 8 CPUs and
# 20 GiB, and KubeRay's chart repository under the name kuberay (helm repo add kuberay URL; KubeRay's guide has the URL).
# Untested: kind was not available during development.
set -eu
cd "$(dirname "$0")/../.."
cluster=${CLUSTER:-trainshed} namespace=${NAMESPACE:-trainshed} kuberay=${KUBERAY_VERSION:-1.7.0}
tag=$(sed -n 's/^appVersion: "\(.*\)"/\1/p' helm/trainshed/Chart.yaml)
for command in docker kind kubectl helm; do
    command -v "$command" > /dev/null || { echo "$0 needs $command" >&2; exit 1; }
done
helm repo list --output yaml | grep -q "name: kuberay$" || { echo "first: helm repo add kuberay URL (KubeRay's guide has the URL)" >&2; exit 1; }

kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster"
kubectl config use-context "kind-$cluster"

for target in service worker; do
    image=trainshed; [ "$target" = service ] || image=trainshed-worker
    docker build --file deploy/Dockerfile --target "$target" --tag "$image:$tag" \
        --build-arg "BASE=${BASE:-python:3.11-slim-bookworm}" --build-arg "TORCH_INDEX=${TORCH_INDEX:-}" --build-arg "VERSION=$tag" \
        --build-arg "REVISION=$(git rev-parse HEAD 2> /dev/null || echo unknown)" .
    kind load docker-image --name "$cluster" "$image:$tag"
done

helm upgrade --install kuberay-operator kuberay/kuberay-operator --version "$kuberay" --namespace kuberay --create-namespace --wait
kubectl create namespace "$namespace" --dry-run=client --output yaml | kubectl apply --filename -
kubectl label --overwrite namespace "$namespace" pod-security.kubernetes.io/enforce=restricted
helm upgrade --install trainshed helm/trainshed --namespace "$namespace" --wait --timeout 10m
kubectl wait pod --namespace "$namespace" -l ray.io/cluster=trainshed-ray --for=condition=Ready --timeout=10m
# The test's pod is kept if the test fails.
helm test trainshed --namespace "$namespace" || { kubectl logs --namespace "$namespace" pod/trainshed-test; exit 1; }
# Submit the demo job from the service's pod, which has the key.
kubectl exec --stdin --namespace "$namespace" deployment/trainshed -- sh -c \
    'TRAINSHED_URL=http://127.0.0.1:8000 TRAINSHED_KEY=$(cat "$TRAINSHED_ADMIN_KEY_FILE") trainshed submit --wait -' < examples/quickstart.yaml
