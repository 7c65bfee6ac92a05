"""The manifests of deploy/k8s, rendered by kubectl and validated: `make test-k8s`. No cluster is run."""
