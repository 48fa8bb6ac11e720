# Everything a person or CI does here is one target; `make` alone lists them.
# Products go to bin/, everything else that is made goes to _output/.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

GO ?= go
# go-nvml wraps all of nvml.h, what is deprecated in it too.
CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations
export CGO_CFLAGS
# Kubernetes version of the local cluster, and its name when several run.
KUBERNETES ?= 1.37
CLUSTER ?= tessera
LOCALCLUSTER := $(GO) run ./sim/cmd/localcluster
# How many states are played with each allocator, and the first seed.
STATES ?= 10000
SEED ?= 0
# How long the soak runs.
FOR ?= 1h
# How long each fuzz target runs.
FUZZTIME ?= 10s

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

TOOLS := _output/tools
TOOLS_STAMP := $(TOOLS)/.stamp

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: prepare ## Build the programs into bin/ and the simulator library beside them
	mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/controller ./cmd/kubectl-gpu ./sim/cmd/localcluster ./cmd/mps-supervisor ./sim/cmd/nvmlsim
	CGO_ENABLED=1 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -tags netgo,osusergo,grpcnotrace -o bin/ ./cmd/kubelet-plugin
	CGO_ENABLED=0 $(GO) run ./sim/cmd/nvmlsim/lib bin/libnvidia-ml.so.1

.PHONY: generate
generate: $(TOOLS_STAMP) ## Make every generated file again
	hack/generate.sh

.PHONY: prepare
prepare: # Install the distribution packages that are missing
	@hack/prepare.sh

$(TOOLS_STAMP): tools/go.mod tools/go.sum
	@echo "building the tools of tools/go.mod (a minute or two the first time)"
	mkdir -p $(TOOLS)
	$(GO) build -C tools -o ../$(TOOLS)/ tool
	touch $@

.PHONY: tools
tools: $(TOOLS_STAMP) # Build the pinned tools

.PHONY: images
images: prepare ## Build the container image without Docker, into _output/images/
	$(GO) run ./deployments/container/build

.PHONY: release
release: ## Make a release of the commit that is checked out, into _output/release/ (VERSION=0.2.0): images, chart, SBOMs, changelog
	@hack/prepare.sh cross
	$(GO) run ./deployments/release -version '$(if $(filter file,$(origin VERSION)),,$(VERSION))'

##@ Check

.PHONY: verify
verify: prepare tools ## Check all that a machine can check: generated files, style, modules, chart
	hack/verify.sh

.PHONY: chart
chart: prepare ## Check the Helm chart: helm lint --strict, and what it renders
	$(GO) test -count 1 ./deployments/helm/...

.PHONY: lint
lint: prepare $(TOOLS_STAMP) ## Run the linters only
	hack/verify.sh format lint logcheck

.PHONY: govulncheck
govulncheck: prepare $(TOOLS_STAMP) ## Ask the Go vulnerability database about the code that is reached; needs the network
	CGO_ENABLED=1 $(TOOLS)/govulncheck ./...

.PHONY: format
format: $(TOOLS_STAMP) ## Format the Go files
	$(TOOLS)/golangci-lint fmt

.PHONY: test
test: cluster-build ## Run every test that needs no GPU; the end-to-end ones on real local clusters. Needs root
	GO='$(GO)' hack/test.sh

.PHONY: test-unit
test-unit: prepare ## Run the tests that need no cluster, with the race detector where code is concurrent; some need root, those of power loss /dev/fuse too
	GO='$(GO)' hack/test.sh unit

.PHONY: test-integration
test-integration: cluster-build ## Run the chart, the controller, and a kubelet plugin that is killed at every step, against a real API server; needs root
	GO='$(GO)' hack/test.sh integration

.PHONY: test-e2e
test-e2e: cluster-build ## Run the stories on real clusters with simulated GPUs, and the local cluster's own; needs root
	GO='$(GO)' hack/test.sh e2e

.PHONY: test-all
test-all: cluster-build ## Run every test and every longer check; what has passed for the same tree isn't run again. Needs root
	GO='$(GO)' hack/test-all.sh

.PHONY: allocators
allocators: prepare ## Play claims with the allocators of all Kubernetes releases, 2 minutes (STATES=10000 SEED=0; UPDATE=1: write the tables of docs/user/compatibility.md)
	$(GO) test -tags allocators -count 1 -timeout 30m ./test/allocators -states $(STATES) -seed $(SEED) $(if $(UPDATE),-update)

.PHONY: matrix
matrix: prepare ## Run a story of every feature on every Kubernetes version, and write docs/user/compatibility.md (hours; ONLY=1.33-on STORIES=one-gpu; can be resumed). Needs root
	$(GO) run ./test/matrix -only '$(ONLY)' -stories '$(STORIES)'

.PHONY: platforms
platforms: prepare ## Run a story on clusters that imitate each platform (GKE, OpenShift, Talos …), and write docs/user/platforms.md (an hour; ONLY=gke-cos; can be resumed). Needs root
	$(GO) run ./test/platforms -only '$(ONLY)'

.PHONY: fuzz
fuzz: prepare ## Fuzz everything that parses, 10 s a target (FUZZTIME=5m: longer)
	GO='$(GO)' hack/fuzz.sh $(FUZZTIME)

.PHONY: soak
soak: cluster-build ## Have pods of all kinds come and go while something fails every few seconds, and look what is left over (FOR=1h SEED=0: a new one). Needs root
	$(GO) run ./test/soak -for $(FOR) -seed $(SEED)

.PHONY: reliability
reliability: cluster-build ## Run the tests that cause failures at every step, and write their counts into docs/dev/reliability.md. Needs root
	GO='$(GO)' hack/test.sh reliability
	$(GO) run ./test/reliability _output/test/reliability.json

.PHONY: bench
bench: cluster-build ## Measure on a cluster of its own; one line a figure (about 11 minutes; BENCHFLAGS=-idle=0: without the idle ones)
	$(GO) run ./test/bench $(BENCHFLAGS)

##@ Try

.PHONY: demo
demo: ## Show the everyday ways to claim a GPU on a real cluster with simulated GPUs; needs root (KEEP=1: leave it up)
	KUBERNETES=$(KUBERNETES) demo/run.sh

.PHONY: demo-down
demo-down: ## Remove what KEEP=1 make demo left
	demo/run.sh down

.PHONY: cluster-build
cluster-build: prepare # Build what local clusters are made of, into the cache; a quarter of an hour the first time
	$(LOCALCLUSTER) build --kubernetes $(KUBERNETES)

.PHONY: cluster-up
cluster-up: prepare ## Bring up a local Kubernetes (KUBERNETES=1.37, CLUSTER=tessera); needs root
	$(LOCALCLUSTER) up --name $(CLUSTER) --kubernetes $(KUBERNETES)

.PHONY: cluster-down
cluster-down: ## Take the local cluster down; nothing of it stays
	$(LOCALCLUSTER) down --name $(CLUSTER)

.PHONY: cluster-status
cluster-status: ## Show the local clusters and their components
	$(LOCALCLUSTER) status

.PHONY: metal-bundle
metal-bundle: prepare ## Bundle everything for a host with a GPU and no network, into _output/metal/
	test/metal/bundle.sh

##@ House

.PHONY: clean
clean: ## Remove what was built here (bin/ and _output/)
	rm -rf bin _output
